"""The measured pace of this engine: what steps and prompt tokens cost, how long sequences run.

These are decayed sums over the last steps, without a model of the hardware. The outlook
predicts by them how long a wait will be. Durations are in seconds.
"""

from __future__ import annotations

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
