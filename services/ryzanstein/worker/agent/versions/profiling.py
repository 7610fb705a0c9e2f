"""The profile that a node's ranks record, one at a time, from the request to the trace.

This module knows neither torch nor steps.
"""

from __future__ import annotations

import asyncio
from itertools import count

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.supervision.messages import ProfileTrace, StartProfile

PROFILE_TIMEOUT_S = 60.0


class Profiling:
    """Requests profiles and matches traces to requests by number.

    A rank may still send the trace of a request whose caller has left; it is dropped.
    """

    def __init__(self, timeout_s: float = PROFILE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._number = 0
        self._trace: asyncio.Future[ProfileTrace] | None = None

    async def record(self, group: EngineGroup, rank: int, steps: int) -> bytes:
        """Returns a Chrome trace of the rank's next steps.

        Raises FAILED_PRECONDITION while another profile is recorded, DEADLINE_EXCEEDED when the
        node has nothing to do. When the caller cancels, the rank stops recording.
        """
        if self._trace is not None:
            raise errors.failed_precondition("PROFILE_RUNS", "another profile is being recorded")
        self._number = next(self._numbers)
        self._trace = asyncio.get_running_loop().create_future()
        group.send(StartProfile(rank, steps, self._number))
        try:
            async with asyncio.timeout(self._timeout_s):
                return _checked(await self._trace)
        except TimeoutError:
            raise errors.deadline_exceeded(f"the node did not run {steps} steps within {self._timeout_s:g} s") from None
        finally:
            if self._trace.cancelled():
                group.send(StartProfile(rank, 0, self._number))
            self._trace = None

    def on_trace(self, trace: ProfileTrace) -> None:
        """Takes a trace that a rank has sent."""
        if self._trace is not None and not self._trace.done() and trace.number == self._number:
            self._trace.set_result(trace)

    def on_gone(self, error: RyzansteinError) -> None:
        """Fails the request because the ranks, and what they recorded, are gone."""
        if self._trace is not None and not self._trace.done():
            self._trace.set_exception(error)


def _checked(trace: ProfileTrace) -> bytes:
    if trace.error:
        raise RyzansteinError(f"rank {trace.rank} failed to record the profile: {trace.error}", Code.INTERNAL, "PROFILE_FAILED")
    if not trace.trace:
        raise RyzansteinError("the trace is too large: request fewer steps", Code.RESOURCE_EXHAUSTED, "TRACE_TOO_LARGE")
    return trace.trace
