"""What threads do later: one thread for all of a client, which lives while something is due."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable


class Alarm:
    """Something to do at a time, in seconds of the monotonic clock."""

    __slots__ = ("_act", "at")

    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self.at = at
        self._act: Callable[[], None] | None = act

    def __lt__(self, other: Alarm) -> bool:
        return self.at < other.at

    def cancel(self) -> None:
        """Forgets what was to be done."""
        self._act = None

    def ring(self) -> None:
        if (act := self._act) is not None:
            act()


class Alarms:
    """The alarms of a client. What they do must be short, and must not raise."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[Alarm] = []
        self._runs = False

    def after(self, seconds: float, act: Callable[[], None]) -> Alarm:
        """Does something after so many seconds, in a thread of its own."""
        alarm = Alarm(time.monotonic() + seconds, act)
        with self._changed:
            heapq.heappush(self._due, alarm)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="ryzanstein-alarms", daemon=True).start()
            elif self._due[0] is alarm:
                self._changed.notify()
        return alarm

    def close(self) -> None:
        """Forgets all of them."""
        with self._changed:
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (alarm := self._next()) is not None:
            alarm.ring()

    def _next(self) -> Alarm | None:
        """Waits for the next one. None, where there is none: the thread ends."""
        with self._changed:
            while self._due:
                left_s = self._due[0].at - time.monotonic()
                if left_s <= 0:
                    return heapq.heappop(self._due)
                self._changed.wait(left_s)
            self._runs = False
        return None
