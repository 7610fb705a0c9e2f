"""Keeps one service of a local cluster running.

It restarts the service however often it ends, with increasing pauses.

The caller passes the time and prints the returned lines. Nothing here waits, so one loop can keep
several services running.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ryzanstein.backoff import Backoff, Streak

BACKOFF = Backoff(first_s=0.5, longest_s=10.0, healthy_s=60.0)


class Keepable(Protocol):
    """A child process that can be started again."""

    name: str
    log_path: Path

    @property
    def running(self) -> bool: ...

    @property
    def ending(self) -> str: ...

    def start(self) -> None: ...

    def kill(self) -> None: ...


class KeptService:
    """Keeps one service running. Call `look` about once a second."""

    def __init__(self, service: Keepable, backoff: Backoff = BACKOFF) -> None:
        self._service = service
        self._streak = Streak(backoff)
        self._started_at: float | None = None
        self._again_at: float | None = None

    def look(self, now: float) -> Iterator[str]:
        """Starts the service if it ended and its pause is over. Yields lines for the user.

        `now` is monotonic seconds.
        """
        if self._started_at is None:
            self._started_at = now  # it has run since before the first look
        if self._again_at is not None:
            if now >= self._again_at:
                yield from self._start(now)
        elif not self._service.running:
            pause_s = self._pause(now)
            ending = self._service.ending
            yield f"{self._service.name} {ending}; restarting in {pause_s:.1f} s{self._row()}"

    def _start(self, now: float) -> Iterator[str]:
        self._again_at, self._started_at = None, now
        try:
            self._service.kill()  # ends what it may have left in its process group
            self._service.start()
        except OSError as error:
            pause_s = self._pause(now)
            yield f"{self._service.name} failed to start: {error}; retrying in {pause_s:.1f} s{self._row()}"

    def _pause(self, now: float) -> float:
        pause_s = self._streak.ended(now - (self._started_at or now))
        self._again_at = now + pause_s
        return pause_s

    def _row(self) -> str:
        return f" ({self._streak.ends} times in a row, see {self._service.log_path})" if self._streak.ends > 1 else ""
