"""A clock that stops while this process does not run, for code that judges peers by their silence.

A process that was stopped, paused by its host or blocked by one long callback cannot have received
anything. What its peers sent meanwhile waits in its sockets, so their silence is measured in the
time that this process ran: lateness of more than a beat does not count, nor, after a long pause,
does the time in which the sockets are read. There is one clock per process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any

TICK_S = 0.05
"""The interval of the clock's checks, a working node's beat. This much lateness counts as none."""
PAUSE_S = 0.25
"""A loop this late was paused. Less lateness is a busy machine, which has no backlog to read."""
_CATCH_UP_S = 0.5  # until the backlog has been read, if the loop is on time meanwhile
_LONGEST_CATCH_UP_S = 2.0  # a loop that stays late must not stop its clock forever
_LATELY_S = 2.0  # an end that is noticed this soon after a pause may have come during it
_GIVEN_UP_S = 1.0  # no process gives up a peer that was silent for less
_MAX_SLEEPS = 256
_LEAST_DELAY_S = 0.001


class AwakeClock:
    """A clock that ticks from its creation, in a running loop, until `close`.

    At each tick it calls `on_lag` with the loop's lateness, and `on_pause` too when a pause is
    over. Neither may block or raise.
    """

    def __init__(
        self, on_lag: Callable[[float], object] = lambda late_s: None, on_pause: Callable[[float], object] = lambda late_s: None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lag = on_lag
        self._on_pause = on_pause
        self.pauses = 0
        """The number of pauses so far, by which each failure detector can notice them."""
        self._slept_s = 0.0
        self._sleeps: deque[tuple[float, float]] = deque(maxlen=_MAX_SLEEPS)
        self._held_at: float | None = None
        self._held_since = self._held_until = self._held_at_most_until = 0.0
        self._paused_at = float("-inf")
        self._arm(time.monotonic())

    def close(self) -> None:
        self._timer.cancel()

    def now(self) -> float:
        """Returns the seconds that this process ran.

        The result never decreases. It differs from `time.monotonic` by the time that the process
        slept.
        """
        if self._held_at is not None:
            return self._held_at
        return min(time.monotonic(), self._due + TICK_S) - self._slept_s

    def slept_since(self, moment: float) -> float:
        """Returns how many seconds since `moment` of `time.monotonic` do not count."""
        now = time.monotonic()
        stands_since = self._held_since if self._held_at is not None else self._due + TICK_S
        slept_s = max(0.0, now - max(moment, stands_since))
        for ended_at, of_it_s in reversed(self._sleeps):
            if ended_at <= moment:
                break
            slept_s += min(of_it_s, ended_at - moment)
        return slept_s

    @property
    def lately_paused(self) -> bool:
        """Whether this process was recently paused for so long that peers may have given it up.

        What looks like their end may be a consequence of that.
        """
        now = time.monotonic()
        return now - self._paused_at < _LATELY_S or now - self._due > _GIVEN_UP_S

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> AwakeTimer:
        """Calls `callback` at a time of this clock, never earlier, like the loop's `call_at`."""
        return AwakeTimer(self, when, lambda: callback(*args))

    def _arm(self, now: float) -> None:
        self._due = now + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        late_s = max(0.0, now - self._due)
        self._on_lag(late_s)
        if self._held_at is not None and late_s <= _GIVEN_UP_S:
            self._catch_up(now, late_s)
        elif self._held_at is not None:
            self._pause(now, late_s)  # again, before the backlog was read: the clock is still held
        elif late_s >= PAUSE_S:
            self._hold(now, late_s)
        elif late_s > TICK_S:
            self._sleep(now, late_s - TICK_S)
        self._arm(now)

    def _hold(self, now: float, late_s: float) -> None:
        self._held_at = self.now()
        self._held_since = self._due + TICK_S
        self._pause(now, late_s)

    def _pause(self, now: float, late_s: float) -> None:
        self.pauses += 1
        self._held_until = now + min(late_s, _CATCH_UP_S)
        self._held_at_most_until = now + _LONGEST_CATCH_UP_S
        if late_s > _GIVEN_UP_S:
            self._paused_at = now
        self._on_pause(late_s)

    def _catch_up(self, now: float, late_s: float) -> None:
        if late_s > TICK_S:
            self._held_until = min(now + _CATCH_UP_S, self._held_at_most_until)
        if now >= self._held_until:
            self._held_at = None
            self._sleep(now, now - self._held_since)

    def _sleep(self, now: float, slept_s: float) -> None:
        self._slept_s += slept_s
        self._sleeps.append((now, slept_s))


class AwakeTimer:
    """A call at a time of an AwakeClock."""

    def __init__(self, clock: AwakeClock, when: float, callback: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._callback = callback
        self.when = when
        self._arm()

    def cancel(self) -> None:
        self._handle.cancel()

    def _arm(self) -> None:
        self._handle = self._loop.call_later(max(self.when - self._clock.now(), _LEAST_DELAY_S), self._fire)

    def _fire(self) -> None:
        if self._clock.now() < self.when:
            self._arm()
        else:
            self._callback()


class AwakeQueue:
    """Names that each fall due at a time of an AwakeClock, with one timer for all of them.

    Times never decrease from one `add` to the next: a queue is for waits of one length. A name is due at its time
    or up to a tick later, so that those of one moment share a timer.
    """

    def __init__(self, clock: AwakeClock, due: Callable[[str], object]) -> None:
        self._clock = clock
        self._due = due
        self._when: dict[str, float] = {}
        self._timer: AwakeTimer | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._when

    def __len__(self) -> int:
        return len(self._when)

    def add(self, name: str, when: float) -> None:
        """Schedules a name, in place of its earlier time."""
        self._when.pop(name, None)
        self._when[name] = when
        if self._timer is None:
            self._arm(when)

    def discard(self, name: str) -> None:
        """Forgets a name, if it is there. The timer stays: most names go before their time."""
        self._when.pop(name, None)

    def close(self) -> None:
        self._when.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, when: float) -> None:
        self._timer = self._clock.call_at(when, self._fire)

    def _fire(self) -> None:
        now = self._clock.now()
        try:
            for name in list(takewhile(lambda name: self._when[name] <= now, self._when)):
                # One that was due may have been discarded, or added again, by the one before.
                if self._when.get(name, now + TICK_S) <= now:
                    del self._when[name]
                    self._due(name)
        finally:
            self._timer = None
            if self._when:
                self._arm(max(next(iter(self._when.values())), now + TICK_S))
