"""Records torch's profiler over some steps of this rank, when the agent requests it.

What the board recorded of these steps is added to the trace, see `trace_rows`.

The profiler starts and writes between steps, and the board shows it: this may take seconds, which
are neither a stall nor part of a step. It is `torch.autograd.profiler`, because the newer
`torch.profiler` imports the whole of inductor when it starts: 70 MB and, at a rank's niceness on
busy cores, several seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.health.trace_rows import TraceRows
from ryzanstein.worker.supervision.group import IDLE, PROFILE
from ryzanstein.worker.supervision.messages import ProfileTrace, StartProfile

MAX_TRACE_BYTES = 256 * 2**20
_PART_BYTES = 2**20


class StepRecorder:
    """A recorder: call `start` between steps, `stepped` after each step, `deliver` when idle.

    Idle means that no rank waits for this one. `send` gets the trace after the last step. The trace
    is empty when it is larger than MAX_TRACE_BYTES, or comes with what went wrong: a profile never
    costs a rank.
    """

    def __init__(self, rank: int, size: int, board: RankBoard, send: Callable[[ProfileTrace], None]) -> None:
        self._rank, self._size = rank, size
        self._board = board
        self._send = send
        self._request = StartProfile((), 0)
        self._profile: Any = None  # torch's profiler is untyped
        self._rows = TraceRows(rank, size)
        self._steps_left = 0

    def start(self, request: StartProfile) -> None:
        """Gives up the current recording and starts the requested one.

        The request may be for another rank, or for none.
        """
        with self._between_steps(request):
            if self._profile is not None:
                self._end()
            if self._rank in request.ranks and request.steps:
                self._request, self._steps_left = request, request.steps
                self._rows = TraceRows(self._rank, self._size)
                self._rows.skip(self._board)
                self._profile = _begun()

    def stepped(self) -> None:
        """Counts a step that the rank has run."""
        self._steps_left -= 1
        if self._profile is not None:
            self._rows.take(self._board)

    def deliver(self) -> None:
        """Sends the trace if the last step has been recorded."""
        if self._profile is None or self._steps_left > 0:
            return
        with self._between_steps(self._request), _chrome_trace(self._end()) as file:
            for part, more in self._rows.added_to(file, MAX_TRACE_BYTES, _PART_BYTES):
                self._send(ProfileTrace(self._rank, part, self._request.number, more=more))

    def _end(self) -> Any:
        """Stops the profiler and returns it."""
        recorded, self._profile = self._profile, None
        recorded.__exit__(None, None, None)
        return recorded

    @contextmanager
    def _between_steps(self, request: StartProfile) -> Iterator[None]:
        self._board.enter(PROFILE)
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self._send(ProfileTrace(self._rank, b"", request.number, f"{type(error).__name__}: {error}"[:1024]))
        finally:
            self._board.enter(IDLE)


def _begun() -> Any:
    import torch
    from torch.autograd import profiler

    on_device: Any = torch.cuda.is_initialized  # untyped, too
    begun: Any = profiler.profile(use_device="cuda" if on_device() else None, use_kineto=True)
    return begun.__enter__()


@contextmanager
def _chrome_trace(recorded: Any) -> Iterator[BinaryIO]:
    """Yields the trace, through a file because the profiler writes only to paths.

    It writes by renaming, so a memfd's path does not work.
    """
    with tempfile.TemporaryDirectory(prefix="ryzanstein-trace-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        with path.open("rb") as file:
            yield file
