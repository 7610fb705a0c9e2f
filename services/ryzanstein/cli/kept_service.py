"""Keeps one service of a local cluster running: restarts it however often it ends, with longer and longer pauses.

The caller passes the time and prints the lines that come back. Nothing here waits, so one loop can keep several services.
"""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.backoff import Backoff, Streak
from ryzanstein.cli.service_process import ServiceProcess

BACKOFF = Backoff(first_s=0.5, longest_s=10.0, healthy_s=60.0)


class KeptService:
    """`look` at it about once a second."""

    def __init__(self, service: ServiceProcess, backoff: Backoff = BACKOFF) -> None:
        self._service = service
        self._streak = Streak(backoff)
        self._started_at: float | None = None
        self._again_at: float | None = None

    def look(self, now: float) -> Iterator[str]:
        """Starts the service when it has ended and its pause is over; what people should know. `now` is monotonic seconds."""
        if self._started_at is None:
            self._started_at = now  # it runs since before the first look
        if self._again_at is not None:
            if now >= self._again_at:
                yield from self._start(now)
        elif not self._service.running:
            pause_s = self._pause(now)
            ending = self._service.ending
            yield f"{self._service.name} {ending}; starting it again in {pause_s:.1f} s{self._row()}"

    def _start(self, now: float) -> Iterator[str]:
        self._again_at, self._started_at = None, now
        try:
            self._service.kill()  # what it may have left in its process group
            self._service.start()
        except OSError as error:
            pause_s = self._pause(now)
            yield f"{self._service.name} cannot be started: {error}; trying again in {pause_s:.1f} s{self._row()}"

    def _pause(self, now: float) -> float:
        pause_s = self._streak.ended(now - (self._started_at or now))
        self._again_at = now + pause_s
        return pause_s

    def _row(self) -> str:
        return f" ({self._streak.ends} times in a row, see {self._service.log_path})" if self._streak.ends > 1 else ""
