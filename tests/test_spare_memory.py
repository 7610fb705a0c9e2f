"""Memory that a peak has left behind goes back to the system."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest

from ryzanstein.process.spare_memory import LEAST_BYTES, QUICK_OBJECTS, CalmCollector, SpareMemory

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


YOUNG = """
import gc, threading, time
from collections import deque
from ryzanstein.process import spare_memory
collector = spare_memory.CalmCollector()
collector.begin()
looked = []
def note(phase, info):
    if phase == "start":
        looked.append((info["generation"], len(gc.get_objects(0)) + len(gc.get_objects(1))))
gc.callbacks.append(note)
def answer_many():
    for i in range(100_000):
        kept.append([i])
def answer_and_burst(young):
    for _ in range(3):
        answer_many()
        if young:
            collector.collect_young()
    looked.clear()
    burst = [[i] for i in range(20_000)]
    return max(looked)
kept = deque(([i] for i in range(100_000)), maxlen=100_000)
collector.collect_young()
for young in (False, True):
    generation, objects = answer_and_burst(young)
    print(generation, objects > 100_000)
"""


def test_a_burst_of_new_objects_stops_for_few_after_those_before_it_were_looked_at() -> None:
    command = [sys.executable, "-P", "-c", YOUNG]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.splitlines() == ["0 True", "0 False"]


MIB = 2**20


class World:
    """What a collector sees: old objects, resident memory in MiB, and the time in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_mib: float = math.inf) -> None:
        self.objects, self.mib, self.now = 10, 100, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.collector = CalmCollector(lambda: self.objects, lambda: self.mib * MIB, limit_mib * MIB)

    def looks(self, objects: int, mib: int, now: float) -> bool:
        """Returns whether it collects then, and does so."""
        self.objects, self.mib, self.now = objects, mib, now
        if not self.collector.look():
            return False
        self.collector.collected()
        return True


def test_memory_that_grows_without_end_is_collected_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    many = 5 * QUICK_OBJECTS
    assert [world.looks(many, 100 + mib, now) for mib, now in ((600, 10.0), (600, 3601.0), (700, 3700.0))] == [
        False,
        True,
        False,
    ]
    assert not world.looks(many, 800, 7300.0), "it has grown little since"
    assert not world.looks(many, 200, 7400.0)
    assert world.looks(many, 800, 7500.0), "it has grown since it was least"


def test_a_process_near_its_limit_collects_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, limit_mib=1000)
    many = 5 * QUICK_OBJECTS
    assert [world.looks(many, 900, now) for now in (30.0, 61.0, 100.0, 122.0)] == [False, True, False, True]


def test_few_objects_are_collected_when_they_or_their_memory_have_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert not world.looks(10_000, 110, 10.0)
    assert world.looks(40_000, 110, 20.0)
    assert not world.looks(41_000, 120, 30.0)
    assert world.looks(41_000, 160, 40.0), "large and few"
    assert not world.looks(10 * QUICK_OBJECTS, 600, 50.0)
    assert not world.looks(15_000, 150, 60.0)
    assert world.looks(36_000, 150, 70.0), "counted from the least since"
