"""Records torch's profiler over some steps of this rank, when the agent asks for it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ryzanstein.worker.ranks.board import FORWARD, PROFILE, RankBoard
from ryzanstein.worker.ranks.messages import ProfileTrace, StartProfile

if TYPE_CHECKING:
    from torch.profiler import profile

MAX_TRACE_BYTES = 15 * 2**20


class StepRecorder:
    """Wrap each step in `step`. `send` gets the trace after the last one; empty when it is larger than MAX_TRACE_BYTES."""

    def __init__(self, rank: int, board: RankBoard, send: Callable[[ProfileTrace], None]) -> None:
        self._rank = rank
        self._board = board
        self._send = send
        self._profile: profile | None = None
        self._steps_left = 0

    def start(self, wish: StartProfile | None) -> None:
        """From the next step on, if the wish is for this rank. One recording at a time."""
        if wish is None or wish.rank != self._rank or self._profile is not None:
            return
        from torch.profiler import profile

        # The profiler's own start and end may take seconds, which the watchdog must not take for a stall.
        self._board.enter(PROFILE)
        self._profile, self._steps_left = profile(), wish.steps
        self._profile.start()
        self._board.enter(FORWARD)

    @contextmanager
    def step(self) -> Iterator[None]:
        yield
        if self._profile is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._board.enter(PROFILE)
                self._profile.stop()
                self._send(ProfileTrace(self._rank, _chrome_trace(self._profile)))
                self._profile = None


def _chrome_trace(recorded: profile) -> bytes:
    """Through a file, because the profiler writes only to paths; by renaming, so a memfd's path does not do."""
    with tempfile.TemporaryDirectory(prefix="ryzanstein-trace-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return path.read_bytes() if path.stat().st_size <= MAX_TRACE_BYTES else b""
