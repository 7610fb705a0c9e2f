"""The state of a rank in shared-memory collectives, which Python and C share.

C computes all-reduces of float32 (`kernels/meeting.c`), alone or within a step of a model. It speaks the
protocol of `shm`, so each collective of each rank may be computed by either.
"""

from __future__ import annotations

from ctypes import Structure, c_int64, c_uint64, c_void_p
from typing import Protocol

from ryzanstein.worker.collectives import OutOfStep, PeerGaveUp
from ryzanstein.worker.collectives.waiting import overdue

AGAIN = 1
PLACES = ("", "embedding", "norm", "qkv", "attention", "o", "gate-up", "down", "head")
"""What a step in C computes, by the codes of `kernels/meeting.h`."""
_TIMED_OUT, _GAVE_UP = 2, 3


class Meeting(Structure):
    """The struct Meeting of meeting.h. Addresses are of memory that the owner of the struct keeps mapped."""

    _fields_ = (
        *((name, c_void_p) for name in ("flags", "slots", "board")),
        *((name, c_int64) for name in ("rank", "size", "spin_ns", "yield_ns", "deadline_ns")),
        *((name, c_uint64) for name in ("arrivals", "epoch_end", "parity")),
        *((name, c_int64) for name in ("peer", "bytes", "waited_ns", "first", "stage", "began_ns", "returns_ns", "status")),
    )
    rank: int
    arrivals: int
    epoch_end: int
    parity: int
    peer: int
    bytes: int
    waited_ns: int


class NativeMeeting(Protocol):
    """All-reduces in C."""

    @property
    def state_bytes(self) -> int:
        """Returns the size of the struct Meeting."""
        ...

    def all_reduce(self, meeting: int, values: int, count: int, again: int, /) -> int:
        """Sums float32 numbers in place over all ranks. Takes addresses, and returns a status: 0, AGAIN or a failure.

        AGAIN: the call has waited for 50 ms. It must be repeated, with `again`. Between the calls
        Python runs handlers of signals.
        """
        ...


def failure(meeting: Meeting, status: int) -> Exception:
    """Returns the exception for the status of an all-reduce in C, with the text that Python's have."""
    op, rank, peer = "all_reduce", meeting.rank, meeting.peer
    if status == _TIMED_OUT:
        return overdue(awaited(op, rank, peer), meeting.waited_ns / 1e9)
    return gave_up(op, peer) if status == _GAVE_UP else out_of_step(op, meeting.bytes, rank, peer)


def awaited(op: str, rank: int, peer: int) -> str:
    return f"{op}: rank {rank} waits for {peer}"


def gave_up(op: str, peer: int) -> PeerGaveUp:
    return PeerGaveUp(f"{op}: rank {peer} has aborted the step")


def out_of_step(op: str, size_bytes: int, rank: int, peer: int) -> OutOfStep:
    return OutOfStep(f"{op} of {size_bytes} bytes: rank {peer} is in a different operation than rank {rank}")
