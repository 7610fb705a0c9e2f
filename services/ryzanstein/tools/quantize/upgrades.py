"""Decides which products get more bits. Plain arithmetic on what was measured.

Everything begins with the fewest bits. Steps of one product to 8 bits, and from there to floats, are
ordered by noise removed per byte added: a greedy walk along the Pareto front of a knapsack. Noises of
products add up nearly (Malinovskii et al. 2024, the linearity theorem), so the loss of some steps
predicts the loss of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOW, EIGHT, FLOATS = range(3)
_MEASUREMENTS = 8
_AIM = 0.8  # of the budget, where a prediction aims
_ENOUGH = 0.6  # of the budget: a choice that uses so much of it is not improved


@dataclass(frozen=True, slots=True)
class UpgradeProduct:
    """A product: its noise in the low format and with 8 bits, relative to the layer's output, and its bytes in all three."""

    noises: tuple[float, float]
    num_bytes: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Upgrades:
    """The steps in order, each a product's index and the format that it gets."""

    products: Sequence[UpgradeProduct]
    steps: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, products: Sequence[UpgradeProduct]) -> Upgrades:
        rated: list[tuple[float, int, int]] = []
        for index, product in enumerate(products):
            (low, eight), sizes = product.noises, product.num_bytes
            first = (low - eight) / max(1, sizes[EIGHT] - sizes[LOW])
            second = eight / max(1, sizes[FLOATS] - sizes[EIGHT])
            rated.append((first, index, EIGHT))
            rated.append((min(first, second), index, FLOATS))
        rated.sort(key=lambda each: (-each[0], each[2], each[1]))
        return cls(products, [(index, kind) for _, index, kind in rated])

    def formats(self, num_steps: int) -> list[int]:
        """Returns the format of each product after so many steps."""
        formats = [LOW] * len(self.products)
        for index, kind in self.steps[:num_steps]:
            formats[index] = kind
        return formats

    def noise(self, num_steps: int) -> float:
        """Returns the noise that is left."""
        left = zip(self.products, self.formats(num_steps), strict=True)
        return sum((*product.noises, 0.0)[kind] for product, kind in left)

    def num_bytes(self, num_steps: int) -> int:
        pairs = zip(self.products, self.formats(num_steps), strict=True)
        return sum(product.num_bytes[kind] for product, kind in pairs)

    def most_within(self, num_bytes: int) -> int | None:
        """Returns the most steps whose bytes are within a bound, None if even none are too large."""
        within = [count for count in range(len(self.steps) + 1) if self.num_bytes(count) <= num_bytes]
        return max(within, default=None)

    def fewest_within(self, budget: float, loss_of: Callable[[int], tuple[float, float]]) -> int | None:
        """Returns a small number of steps whose measured loss is within the budget, None if none was found.

        `loss_of` measures: the loss, and the upper end of its interval, which must be within. At most
        8 measurements are made, and none after one that uses most of the budget.
        """
        failing, passing, count, known_good = -1, len(self.steps), 0, False
        for turn in range(_MEASUREMENTS):
            loss, upper = loss_of(count)
            if upper <= budget:
                passing, known_good = count, True
            else:
                failing = count
            if passing - failing <= 1 or _ENOUGH * budget <= upper <= budget:
                break
            predicted = self._predicted(count, (loss, upper), budget) if turn < _MEASUREMENTS // 2 else (failing + passing) // 2
            count = min(max(predicted, failing + 1), passing - 1)
        return passing if known_good else None

    def _predicted(self, count: int, measured: tuple[float, float], budget: float) -> int:
        """Returns the fewest steps of which the interval should be within the budget.

        The loss is proportional to the noise, the width of its interval to the noise's root.
        """
        (loss, upper), noise = measured, self.noise(count)
        if not 0 < loss < upper < math.inf or noise == 0:
            return count // 2
        width = upper - loss
        root = (math.sqrt(width**2 + 4 * loss * _AIM * budget) - width) / (2 * loss)
        wanted = noise * root**2
        return next(steps for steps in range(len(self.steps) + 1) if self.noise(steps) <= wanted or steps == len(self.steps))
