"""Memory that a peak has left behind goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ryzanstein.process.spare_memory import LEAST_BYTES, QUICK_BLOCKS, CalmCollector, SpareMemory

PEAK = """
from ryzanstein.process.spare_memory import resident_bytes, trim
kept, freed = [], []
for _ in range(2000):
    freed.append(bytearray(60_000))
    kept.append(bytearray(600))
peak = resident_bytes()
del freed
left = resident_bytes()
trim()
print(peak, left, resident_bytes())
"""


ARENAS = """
import ctypes, re, sys, threading
from ryzanstein.process.spare_memory import limit_arenas
limit_arenas()
libc, barrier = ctypes.CDLL(None), threading.Barrier(6)
libc.malloc.restype = ctypes.c_void_p
def allocate():
    libc.malloc(ctypes.c_size_t(3000))
    barrier.wait(30)
threads = [threading.Thread(target=allocate) for _ in range(5)]
for thread in threads:
    thread.start()
barrier.wait(30)
libc.fopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def _arenas(**environment: str) -> int:
    command = [sys.executable, "-P", "-c", ARENAS]
    found = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=60)
    return found.stdout.count("<heap nr=")


def test_threads_share_two_arenas() -> None:
    assert _arenas() == 2


def test_a_limit_of_arenas_that_is_set_stays() -> None:
    assert _arenas(MALLOC_ARENA_MAX="1") == 1


def test_what_was_freed_between_what_is_in_use_is_given_back() -> None:
    message = subprocess.run([sys.executable, "-P", "-c", PEAK], capture_output=True, text=True, check=True, timeout=60).stdout
    peak, left, after = map(int, message.split())
    assert after < left - 50_000_000, (peak, left, after)


def test_it_is_given_back_when_it_has_grown_and_grows_no_more() -> None:
    sizes = iter([100, 100, 100 + LEAST_BYTES, 200 + LEAST_BYTES, 200 + LEAST_BYTES, 50 + LEAST_BYTES, 50 + LEAST_BYTES])
    spare = SpareMemory(lambda: next(sizes))
    assert [spare.look() for _ in range(4)] == [False, False, False, True]
    spare.trimmed()
    assert not spare.look(), "what is left is in use"


COLLECTING = """
import gc
from ryzanstein.process.spare_memory import CalmCollector
collector, full = CalmCollector(), []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
collector.begin()
began = len(full)
kept = []
for i in range(1_000_000):
    kept.append([i])
print(len(full) - began, collector.look())
kept.clear()
for i in range(30_000):
    each = []
    each.append(each)
    kept.append(each)
gc.collect(1)
kept.clear()
print(collector.look())
gc.collect()
collector.collected()
print(collector.look())
"""


def test_many_objects_that_are_in_use_are_not_looked_at_and_cycles_are_once_there_are_few() -> None:
    command = [sys.executable, "-P", "-c", COLLECTING]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.splitlines() == ["0 False", "True", "False"]


def test_memory_that_grows_without_end_is_collected_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    size, now = 100, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    collector = CalmCollector(iter([0, *[5 * QUICK_BLOCKS] * 9]).__next__, lambda: size)
    size, now = 100 + 600 * 2**20, 10.0
    assert not collector.look()
    now = 3601.0
    assert collector.look()
    collector.collected()
    assert not collector.look()
