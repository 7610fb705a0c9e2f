"""All-reduces in C among the ranks of one machine."""

from __future__ import annotations

from ctypes import CDLL, c_int, c_int64

from ryzanstein.worker.kernels.functions.declaring import declared, pointers


class MeetingFunctions:
    """The functions of meeting.c, as `collectives.meeting.NativeMeeting` describes them."""

    def __init__(self, library: CDLL) -> None:
        self.all_reduce = declared(library, "meeting_all_reduce", *pointers(2), c_int64, c_int, returns=c_int)
        self._bytes = declared(library, "meeting_bytes", returns=c_int64)

    @property
    def state_bytes(self) -> int:
        """Returns the size of the struct Meeting in C."""
        size: int = self._bytes()
        return size
