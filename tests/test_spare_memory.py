"""Memory that a peak has left behind goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys

from ryzanstein.process.spare_memory import LEAST_BYTES, SpareMemory

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
