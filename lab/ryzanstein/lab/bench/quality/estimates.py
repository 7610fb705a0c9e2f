"""Means with standard errors, from the sums of windows and prompts.

Tokens of a window depend on each other, windows hardly: they are the sample. A mean per token over
windows of unequal length is a ratio of two sums; its standard error is that of Cochran, Sampling
Techniques (1977), section 6.3. A format and the reference are compared in each window: what makes a
window hard for both cancels, and the error bar of the difference is many times smaller than that of
either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.lab.bench.quality.document import GreedyMatch, WindowSums


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error, which is NaN for a sample of one."""

    mean: float
    error: float

    def exp(self) -> Estimate:
        """Returns the exponential, with the error to first order."""
        return Estimate(math.exp(self.mean), math.exp(self.mean) * self.error)

    def minus(self, number: float) -> Estimate:
        return Estimate(self.mean - number, self.error)


def per_token(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """Returns the mean per token of what the windows have summed."""
    total, size = sum(counts), len(counts)
    mean = math.fsum(sums) / total
    if size < 2:
        return Estimate(mean, math.nan)
    squares = math.fsum((value - mean * count) ** 2 for value, count in zip(sums, counts, strict=True))
    return Estimate(mean, math.sqrt(size / (size - 1) * squares) / total)


def over_texts(estimates: Sequence[Estimate]) -> Estimate:
    """Returns the mean of texts, each with the same weight."""
    size = len(estimates)
    return Estimate(
        math.fsum(each.mean for each in estimates) / size, math.sqrt(math.fsum(each.error**2 for each in estimates)) / size
    )


def perplexity(windows: Sequence[WindowSums]) -> Estimate:
    return per_token([each.loss for each in windows], _counts(windows)).exp()


def added_loss(windows: Sequence[WindowSums], reference: Sequence[WindowSums]) -> Estimate:
    """Returns by how many nats per token the loss is larger than the reference's, paired by window."""
    pairs = zip(windows, reference, strict=True)
    return per_token([mine.loss - other.loss for mine, other in pairs], _counts(windows))


def divergence(windows: Sequence[WindowSums]) -> Estimate:
    return per_token([each.divergence for each in windows], _counts(windows))


def same_token(windows: Sequence[WindowSums]) -> Estimate:
    return per_token([each.same for each in windows], _counts(windows))


def equal_beginning(matches: Sequence[GreedyMatch]) -> Estimate:
    """Returns the number of tokens until the first difference."""
    return per_token([each.until_different for each in matches], [1] * len(matches))


def same_greedy(matches: Sequence[GreedyMatch], new_tokens: int) -> Estimate:
    """Returns the share of the answers' tokens."""
    return per_token([each.same / new_tokens for each in matches], [1] * len(matches))


def _counts(windows: Sequence[WindowSums]) -> list[int]:
    return [each.num_tokens for each in windows]
