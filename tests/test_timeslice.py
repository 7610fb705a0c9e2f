"""Short slices: what the kernel says of a process that asked for them."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from ryzanstein.process import timeslice

_GETATTR = {"x86_64": 315, "aarch64": 275}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


needs_slices = pytest.mark.skipif(_kernel() < (6, 12), reason="the kernel gives no slices of one's own before 6.12")


def slice_ns() -> int:
    """Of the calling thread, as sched_getattr(2) says."""
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(_GETATTR[platform.machine()], 0, buffer, _ATTRIBUTES.size, 0) == 0
    return int(_ATTRIBUTES.unpack(buffer.raw)[5])


def in_a_thread(call: Callable[[], int]) -> int:
    """In a thread of its own, whose end undoes what was asked for."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@needs_slices
def test_who_asks_gets_short_slices_and_so_do_its_threads_and_processes() -> None:
    def asked() -> int:
        assert timeslice.ask_for_short_slices()
        assert slice_ns() == timeslice.SHORT_NS
        child = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
        assert int(child.stdout) == timeslice.SHORT_NS
        return in_a_thread(slice_ns)

    assert slice_ns() != timeslice.SHORT_NS
    assert in_a_thread(asked) == timeslice.SHORT_NS


@needs_slices
def test_the_usual_ones_can_be_had_back() -> None:
    usual = slice_ns()

    def back() -> int:
        assert timeslice.ask_for_short_slices()
        assert timeslice.take_usual_slices()
        return slice_ns()

    assert in_a_thread(back) == usual


def test_niceness_stays_what_it_is() -> None:
    code = (
        "import os; from ryzanstein.process import timeslice; os.nice(3); timeslice.ask_for_short_slices(); print(os.nice(0))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "3\n"


def test_a_real_time_process_is_left_alone() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make one")
    code = (
        "import os; from ryzanstein.process import timeslice; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)); "
        "print(timeslice.ask_for_short_slices(), os.sched_getscheduler(0) == os.SCHED_RR)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False True\n"


if __name__ == "__main__":
    print(slice_ns())
