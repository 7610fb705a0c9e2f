"""The measured pace of this engine: what steps and prompt tokens cost, how long sequences run.

These are decayed sums over the last steps, without a model of the hardware. The outlook
predicts by them how long a wait will be. Durations are in seconds.

What prompt tokens cost is measured too: more the longer the context that they read. The scheduler cuts
prompts by it, so that steps in which others decode keep their objective. That is a loop that measures
its own decisions. While it holds every step at one duration, a straight line through (tokens, duration)
is flat, whatever tokens cost. So the duration of a step without prompt tokens is measured alone, and
what a step takes beyond it is

    tokens * `token_s` + pairs * `pair_s`

where pairs are those of a prompt token and a token that it reads. Sums decay by steps that have prompt
tokens, not by time: what prompts cost is still known after a pause. Durations are in seconds.

The size of a step is limited when memory is short. The limit is lowered by steps that failed and raised
again while steps succeed. Additive increase would need a step for every token. This doubles the limit,
and seldom enough that trying costs next to nothing.
"""

from __future__ import annotations

import math
from collections import deque

_STEPS_UNTIL_MORE = 64


class StepLimit:
    """A limit on the tokens of one execution. `budget` is the limit with enough memory."""

    def __init__(self, budget: int) -> None:
        self._budget = self._limit = budget
        self._good = 0
        self.num_shortages = 0

    @property
    def limit(self) -> int:
        """How many tokens may be tried. A single one is always tried."""
        return max(1, self._limit)

    def allows(self, num_tokens: int) -> bool:
        """Returns whether an execution of so many tokens may be tried."""
        return num_tokens <= self.limit

    def short(self, num_tokens: int) -> None:
        """Records that memory ran out for so many tokens."""
        self.num_shortages += 1
        self._good = 0
        self._limit = min(self._limit, max(1, num_tokens // 2))

    def went(self, num_tokens: int) -> None:
        """Records that so many tokens were computed.

        Only a step near the limit shows that the limit could be higher.
        """
        if self._limit == self._budget or 2 * num_tokens <= self._limit:
            return
        self._good += 1
        if self._good >= _STEPS_UNTIL_MORE:
            self._good = 0
            self._limit = min(self._budget, 2 * self._limit)


_KEEP = 0.9  # weight of a step one step later: half after 7
_LEAST_PROMPT_STEPS = 3
_GROWTH = 2.0  # of a chunk from one step to the next: costs may be far from what was measured with a smaller one
_LEAST_CHUNK = 16  # where decodes alone take longer than the objective
_SMALLEST_CHUNK = 4  # else: what a token costs grows with its context, and 16 may take longer than is left
_FIRST_CHUNK = 32  # nothing is known of the cost
_KEPT_ERRORS, _FEW_ERRORS = 100, 50  # from few on, their quantile is known
_QUANTILE = 0.99  # of steps with prompt tokens that keep the objective
_SPREADS, _NEWEST = 2.0, 10  # before: so many times the usual error of the newest is kept free
_ALIKE = 1e-4  # relative variance of contexts below which their cost is not told apart from that of tokens


def num_pairs(num_tokens: int, num_context: int) -> float:
    """Returns how many pairs of a token and a token that it reads there are, itself included."""
    return num_tokens * (num_context + (num_tokens + 1) / 2)


class PromptCost:
    """Measurements of steps, updated after each."""

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        """The duration of a step without prompt tokens; 0 before the first."""
        self._num_steps, self._largest = 0, 0.0
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0  # x tokens, z pairs, y duration beyond that of decodes
        self._errors: deque[float] = deque(maxlen=_KEPT_ERRORS)  # of predictions, relative to them
        self._token_s = self._pair_s = 0.0

    @property
    def known(self) -> bool:
        """Returns whether steps with prompt tokens were measured."""
        return self._num_steps >= _LEAST_PROMPT_STEPS

    @property
    def margin(self) -> float:
        """Returns what nearly every step exceeds its prediction by at most, relative to it; never negative."""
        if len(self._errors) >= _FEW_ERRORS:
            ordered = sorted(self._errors)
            return max(0.0, ordered[math.ceil(_QUANTILE * len(ordered)) - 1])
        newest = list(self._errors)[-_NEWEST:]
        return _SPREADS * math.sqrt(sum(error * error for error in newest) / len(newest)) if newest else 0.0

    def step(self, num_tokens: int, pairs: float, duration_s: float) -> None:
        """Records a step: its prompt tokens, their pairs, and its duration."""
        if not num_tokens:
            before_s = self.decode_step_s or duration_s
            self.decode_step_s = _KEEP * before_s + (1 - _KEEP) * duration_s
            return
        # A step takes at least as long as its decodes: what was measured before is too much then. Without this it would stay,
        # and prompts would get the least, for as long as every step has prompt tokens.
        self.decode_step_s = min(self.decode_step_s, duration_s)
        if self.known:
            self._judge(duration_s, self.decode_step_s + self.prompt_s(num_tokens, pairs))
        self._num_steps += 1
        self._largest = max(num_tokens, _KEEP * self._largest)
        beyond_s = max(0.0, duration_s - self.decode_step_s)
        self._xx = _KEEP * self._xx + num_tokens * num_tokens
        self._xz = _KEEP * self._xz + num_tokens * pairs
        self._zz = _KEEP * self._zz + pairs * pairs
        self._xy = _KEEP * self._xy + num_tokens * beyond_s
        self._zy = _KEEP * self._zy + pairs * beyond_s
        self._token_s, self._pair_s = self._solved()

    def prompt_s(self, num_tokens: int, pairs: float) -> float:
        """Returns what so many prompt tokens add to a step."""
        return num_tokens * self._token_s + pairs * self._pair_s

    def aim_s(self, objective_s: float) -> float:
        """Returns the duration to plan for, so that nearly every step keeps the objective."""
        return objective_s / (1 + min(1.0, self.margin))

    def allowance(self, objective_s: float) -> Allowance:
        """Returns what a step may spend on prompts beside its decodes."""
        if not self.known:
            return Allowance(self, math.inf, _FIRST_CHUNK)
        most = max(_LEAST_CHUNK, int(_GROWTH * self._largest))
        return Allowance(self, self.aim_s(objective_s) - self.decode_step_s, most)

    def _judge(self, duration_s: float, predicted_s: float) -> None:
        """Records how far a prediction was off. A step in which the machine stood still counts as twice as long."""
        self._errors.append(min(2.0, duration_s / predicted_s if predicted_s else 2.0) - 1)

    def _solved(self) -> tuple[float, float]:
        """Returns the costs of a token and of a pair with the least squares of errors, neither negative."""
        determinant = self._xx * self._zz - self._xz * self._xz
        if determinant > _ALIKE * self._xx * self._zz:
            token_s = (self._xy * self._zz - self._zy * self._xz) / determinant
            pair_s = (self._zy * self._xx - self._xy * self._xz) / determinant
            if token_s >= 0 and pair_s >= 0:
                return token_s, pair_s
            if token_s < 0:
                return 0.0, self._zy / self._zz
        return self._xy / self._xx, 0.0


class Allowance:
    """The time that a step has for prompt tokens, and the most that it takes of them."""

    def __init__(self, cost: PromptCost, left_s: float, most: int) -> None:
        self._cost, self._left_s, self._most, self._taken = cost, left_s, most, 0

    def room(self, num_context: int) -> int:
        """Returns how many tokens behind so many others fit. The first prompt gets some in any case: it must not starve."""
        least = 0 if self._taken else _LEAST_CHUNK if self._left_s <= 0 else _SMALLEST_CHUNK
        return max(least, min(self._fits(num_context), self._most - self._taken))

    def take(self, num_tokens: int, num_context: int) -> None:
        """Spends the time of so many tokens."""
        self._taken += num_tokens
        self._left_s -= self._cost.prompt_s(num_tokens, num_pairs(num_tokens, num_context))

    def _fits(self, num_context: int) -> int:
        """Solves token_s n + pair_s n (context + (n + 1) / 2) = left_s for n."""
        token_s, pair_s = self._cost.prompt_s(1, 0), self._cost.prompt_s(0, 1)
        linear = token_s + pair_s * (num_context + 0.5)
        if self._left_s <= 0:
            return 0
        if math.isinf(self._left_s) or not linear:
            return self._most
        return int(2 * self._left_s / (linear + math.sqrt(linear * linear + 2 * pair_s * self._left_s)))


_KEEP_STEP = 0.99  # weight of a step one step later: half after 69
_KEEP_LENGTH = 0.97  # ... and of an ended sequence one end later
_LEAST_STEPS = 8  # fewer say little: caches and allocators are cold


class StepPace:
    """Measurements that the engine updates after every step and every end."""

    def __init__(self) -> None:
        # Decayed sums of a straight line through (prompt tokens x, duration y).
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._num_ends = self._lengths = self._shares = self._squares = 0.0

    @property
    def known(self) -> bool:
        """Returns whether there are enough steps to draw conclusions."""
        return self._n > _LEAST_STEPS * _KEEP_STEP**_LEAST_STEPS

    @property
    def step_s(self) -> float:
        """Returns the recent mean duration of a step; 0 before the first."""
        return self._y / self._n if self._n else 0.0

    @property
    def prefill_token_s(self) -> float:
        """Returns what one more prompt token adds to a step: the slope."""
        variance = self._n * self._xx - self._x * self._x
        if variance <= 1e-9 * self._n * self._xx:
            return 0.0
        return max(0.0, (self._n * self._xy - self._x * self._y) / variance)

    @property
    def decode_step_s(self) -> float:
        """Returns the duration of a step without prompt tokens: the intercept."""
        return max(0.0, self.step_s - self.prefill_token_s * self._x / self._n) if self._n else 0.0

    @property
    def mean_length(self) -> float:
        """Returns the steps that a sequence runs; 0 before the first has ended."""
        return self._lengths / self._num_ends if self._num_ends else 0.0

    @property
    def mean_share(self) -> float:
        """Returns the generated share of the allowed tokens, on average; 1 before the first end."""
        return self._shares / self._num_ends if self._num_ends else 1.0

    @property
    def irregularity(self) -> float:
        """Returns how little a sequence's age says about what is left of it.

        It is 0 when all take the same share, and 1 when they end as if by chance in every step (the
        squared coefficient of variation of the share, at most 1).
        """
        mean = self.mean_share
        return min(1.0, max(0.0, self._squares / self._num_ends / mean**2 - 1)) if self._num_ends and mean else 0.0

    def step(self, num_prefill: int, duration_s: float) -> None:
        """Records a step: its prompt tokens and its duration."""
        self._n = self._n * _KEEP_STEP + 1
        self._x = self._x * _KEEP_STEP + num_prefill
        self._y = self._y * _KEEP_STEP + duration_s
        self._xx = self._xx * _KEEP_STEP + num_prefill * num_prefill
        self._xy = self._xy * _KEEP_STEP + num_prefill * duration_s

    def end(self, num_generated: int, num_allowed: int) -> None:
        """Records that a sequence left its place for good, with tokens generated and allowed."""
        share = num_generated / max(1, num_allowed)
        self._num_ends = self._num_ends * _KEEP_LENGTH + 1
        self._lengths = self._lengths * _KEEP_LENGTH + num_generated
        self._shares = self._shares * _KEEP_LENGTH + share
        self._squares = self._squares * _KEEP_LENGTH + share * share

    def prefill_s(self, num_tokens: int, room: int) -> float:
        """Returns the time until so many prompt tokens are computed, `room` of them per step."""
        if num_tokens <= 0:
            return 0.0
        return -(-num_tokens // max(1, room)) * self.decode_step_s + num_tokens * self.prefill_token_s

    def release_s(self, num_places: int) -> float:
        """Returns the mean time between two ends among so many sequences (Little's law)."""
        return self.step_s * self.mean_length / max(1, num_places)
