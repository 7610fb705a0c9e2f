"""Distinguishes a stall from slowness. Plain logic.

Pending work that does not move for max(2 s, 10 x p99 step) is a stall. The watchdog knows no
processes: it is given every rank's progress now and then and determines which rank holds the others
up. Being idle is not a stall. A step with many tokens may take longer than a p99 of decode steps,
so the bound is that of the step's size, see `StepTimes`.

Idle ranks are checked now and then, so that a hung rank is found before a request pays for it. One
check at a time: the answers of healthy ranks to further checks would look like progress of the hung
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ryzanstein.bounds import LARGEST, PositiveSeconds
from ryzanstein.worker.supervision.group import STANDSTILLS, RankProgress


class IdleChecks:
    """The checks of idle ranks.

    `number` is that of the last check, 0 before the first. `interval_s` 0: no checks.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._busy_at: float | None = None
        self.number = 0

    def answered(self, ranks: Sequence[RankProgress]) -> bool:
        """Returns whether all ranks above 0 have answered the last check.

        Rank 0 answers with a message to the agent, and passes the check on to the others.
        """
        return all(rank.answered >= self.number for rank in ranks[1:])

    def due(self, now: float, *, busy: bool) -> bool:
        """Returns whether to check now, with the next number. `busy`: something runs or is owed."""
        if busy or self._busy_at is None:
            self._busy_at = now
        if not self._interval_s or now - self._busy_at < self._interval_s:
            return False
        self._busy_at = now
        self.next()
        return True

    def next(self) -> int:
        """Returns the number of one check more."""
        self.number += 1
        return self.number


_WINDOW_STEPS = 512


@dataclass(frozen=True, slots=True)
class StallBounds:
    """How long nothing may move."""

    min_s: PositiveSeconds = 2.0
    """The least time without progress that is a stall, in seconds."""
    factor: Annotated[float, Field(ge=1, le=LARGEST)] = 10.0
    """The least multiple of the p99 step that is a stall."""
    profile_s: PositiveSeconds = 60.0
    """The time in seconds while a rank's profiler starts or writes, and in the other `STANDSTILLS`."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall: the rank that holds the others up, where, and for how long."""

    rank: int
    phase: str
    collective: int
    stalled_s: float
    waiting: tuple[int, ...]
    waiting_phase: str

    def __str__(self) -> str:
        text = f"rank {self.rank} has not moved for {self.stalled_s:.1f} s ({self.phase}, collective {self.collective})"
        if self.waiting:
            ranks = ", ".join(str(rank) for rank in self.waiting)
            text += f"; rank {ranks} waits in {self.waiting_phase}"
        return text


class StepTimes:
    """The durations of the last steps, and how long steps of other sizes may take now.

    The fixed cost of a step is most of a decode step, so its duration says little about a prompt's:
    per token, it would allow a hung prompt of some hundred tokens many minutes. So the fastest step
    of each size (a power of two of tokens) is kept, and how many times slower than that the last
    steps were.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._slowdowns: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._fastest: dict[int, float] = {}

    def add(self, step_s: float, num_tokens: int) -> None:
        size = max(1, num_tokens).bit_length()
        fastest = self._fastest[size] = min(self._fastest.get(size, step_s), step_s)
        self._steps.append(step_s)
        self._slowdowns.append(step_s / fastest if fastest else 1.0)

    def expected_s(self, num_tokens: int) -> float:
        """Returns a high estimate for a step that feeds so many tokens; 0 before the first."""
        if not self._steps:
            return 0.0
        return max(_p99(self._steps), self._fastest_s(num_tokens) * _p99(self._slowdowns))

    def _fastest_s(self, num_tokens: int) -> float:
        """Returns the duration of the fastest step of that size, or of the next larger size that was seen.

        Beyond the largest, durations grow with the tokens. The warm-up has the largest size.
        """
        size, largest = num_tokens.bit_length(), max(self._fastest)
        if size > largest:
            return self._fastest[largest] * num_tokens / 2.0 ** (largest - 1)
        return self._fastest[min(seen for seen in self._fastest if seen >= size)]


def _p99(values: Collection[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


class Watchdog:
    """A detector of stalls: call `observe` with the ranks a few times a second."""

    def __init__(self, bounds: StallBounds, interval_s: float) -> None:
        self._bounds = bounds
        self._interval_s = interval_s
        self._times = StepTimes()
        self._seen: tuple[tuple[int, int, float, str], ...] = ()
        self._still_s = 0.0
        self._observed_s: float | None = None

    def record(self, step_s: float, num_tokens: int) -> None:
        """Records a step that ended.

        The warm-up counts as the first step, so that the first request is bounded by a measurement.
        """
        self._times.add(step_s, num_tokens)

    def bound_s(self, ranks: Sequence[RankProgress]) -> float:
        """Returns how long the ranks may stay where they are.

        Between steps the board still shows the tokens of the last step, which no longer count.
        """
        if any(rank.phase in STANDSTILLS for rank in ranks):
            return self._bounds.profile_s
        num_tokens = max((rank.num_tokens for rank in ranks if rank.in_step), default=0)
        return max(self._bounds.min_s, self._bounds.factor * self._times.expected_s(num_tokens))

    def observe(
        self, now: float, ranks: Sequence[RankProgress], *, pending: bool, stopped: Callable[[], Collection[int]] = tuple
    ) -> Stall | None:
        """Returns a stall, or None. `now` is monotonic seconds.

        `pending`: the agent waits for tokens or an answer. `stopped` returns the ranks whose
        processes do not run (SIGSTOP); it is called only when there is a stall. Time without
        observation (the agent itself was frozen) does not count against the ranks.
        """
        passed = 0.0 if self._observed_s is None else min(now - self._observed_s, 2 * self._interval_s)
        self._observed_s = now
        seen = tuple((rank.step, rank.collective, rank.progress_s, rank.place) for rank in ranks)
        if seen != self._seen or not (pending or any(rank.in_step for rank in ranks)):
            self._seen, self._still_s = seen, 0.0
            return None
        self._still_s += passed
        if self._still_s < self.bound_s(ranks):
            return None
        return _diagnose(ranks, stopped(), self._still_s)


def _diagnose(ranks: Sequence[RankProgress], stopped: Collection[int], stalled_s: float) -> Stall:
    """Returns the stall, which names the rank that is behind.

    Within a step: the rank with the fewest collectives; among equals one that is stopped, then the
    one that moved least recently. Between steps: one that is stopped, then the first that has not
    answered, because rank 0 passes on work and checks.
    """
    if any(rank.in_step for rank in ranks):
        behind = min(ranks, key=lambda r: (r.step, r.collective, r.rank not in stopped, r.progress_s))
    else:
        behind = min(ranks, key=lambda r: (r.rank not in stopped, r.answered, r.rank))
    waiting = [r for r in ranks if r.rank != behind.rank and r.in_step]
    furthest = max(waiting, key=lambda r: (r.step, r.collective), default=None)
    return Stall(
        behind.rank,
        behind.doing,
        behind.collective,
        stalled_s,
        tuple(r.rank for r in waiting),
        f"{furthest.doing} (collective {furthest.collective})" if furthest else "",
    )
