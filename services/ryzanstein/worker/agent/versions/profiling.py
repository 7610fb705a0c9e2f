"""The profile that a node's ranks record, one at a time, from the request to the traces.

This module knows neither torch nor steps.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import count
from typing import BinaryIO

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.supervision.messages import ProfileTrace, StartProfile

PROFILE_TIMEOUT_S = 60.0


class _Recording:
    """The traces of one request, in files without a name: nothing of them is left, however the node ends."""

    def __init__(self, number: int, ranks: Sequence[int], files: ExitStack) -> None:
        self.number = number
        self.files: dict[int, BinaryIO] = {rank: files.enter_context(_unnamed()) for rank in ranks}
        self._missing = set(ranks)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, trace: ProfileTrace) -> None:
        """Takes a trace, or a part of one."""
        if self.done.done() or trace.number != self.number or trace.rank not in self._missing:
            return
        try:
            self.files[trace.rank].write(_checked(trace))
        except OSError as error:
            text = f"the node has no room for the trace: {error}"
            self.done.set_exception(RyzansteinError(text, Code.RESOURCE_EXHAUSTED, "TRACE_TOO_LARGE"))
        except RyzansteinError as error:
            self.done.set_exception(error)
        if not trace.more:
            self._missing.discard(trace.rank)
        if not self._missing and not self.done.done():
            self.done.set_result(None)


class Profiling:
    """Requests profiles and matches traces to requests by number.

    A rank may still send the trace of a request whose caller has left; it is dropped.
    """

    def __init__(self, timeout_s: float = PROFILE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._recording: _Recording | None = None

    @asynccontextmanager
    async def recorded(self, group: EngineGroup, ranks: Sequence[int], steps: int) -> AsyncIterator[dict[int, BinaryIO]]:
        """Yields files with the Chrome traces of the next steps of these ranks, at their beginning.

        Raises FAILED_PRECONDITION while another profile is recorded, DEADLINE_EXCEEDED when the
        node has nothing to do. When the caller cancels, the ranks stop recording.
        """
        if self._recording is not None:
            raise errors.failed_precondition("PROFILE_RUNS", "another profile is being recorded")
        with ExitStack() as files:
            self._recording = recording = _Recording(next(self._numbers), ranks, files)
            try:
                group.send(StartProfile(tuple(ranks), steps, recording.number))
                await self._arrived(recording, steps)
            finally:
                if not group.lost.done() and (recording.done.cancelled() or recording.done.exception()):
                    group.send(StartProfile((), 0, recording.number))
                self._recording = None
            for file in recording.files.values():
                file.seek(0)
            yield recording.files

    async def _arrived(self, recording: _Recording, steps: int) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await recording.done
        except TimeoutError:
            raise errors.deadline_exceeded(f"the node did not run {steps} steps within {self._timeout_s:g} s") from None

    def on_trace(self, trace: ProfileTrace) -> None:
        """Takes a trace, or a part of one, that a rank has sent."""
        if self._recording is not None:
            self._recording.take(trace)

    def on_gone(self, error: RyzansteinError) -> None:
        """Fails the request because the ranks, and what they recorded, are gone."""
        if self._recording is not None and not self._recording.done.done():
            self._recording.done.set_exception(error)


def _unnamed() -> BinaryIO:
    return tempfile.TemporaryFile()


def _checked(trace: ProfileTrace) -> bytes:
    if trace.error:
        raise RyzansteinError(f"rank {trace.rank} failed to record the profile: {trace.error}", Code.INTERNAL, "PROFILE_FAILED")
    if not trace.trace:
        raise too_large()
    return trace.trace


def too_large() -> RyzansteinError:
    return RyzansteinError("the trace is too large: request fewer steps", Code.RESOURCE_EXHAUSTED, "TRACE_TOO_LARGE")
