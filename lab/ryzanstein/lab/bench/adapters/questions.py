"""What is asked of many adapters: few of them often, most of them seldom."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

PROMPTS = ("Count from 1 to 9.", "Say hello.", "What is the capital of France?", "Name three colours.")


@dataclass(frozen=True, slots=True)
class AdapterQuestion:
    """A prompt to a model by its public name."""

    model: str
    prompt: str


@dataclass(frozen=True, slots=True)
class ZipfMix:
    """Draws of names: the i-th with a weight of 1 / i ** `exponent` (Zipf). `base_share` is the chance of `base` instead."""

    names: tuple[str, ...]
    base: str
    exponent: float = 1.0
    base_share: float = 0.2

    def drawn(self, seed: int) -> Iterator[AdapterQuestion]:
        """Yields questions without end, the same for the same seed."""
        rng = random.Random(seed)
        weights = list(accumulate(1 / (place + 1) ** self.exponent for place in range(len(self.names))))
        while True:
            asks_base = not self.names or rng.random() < self.base_share
            name = self.base if asks_base else rng.choices(self.names, cum_weights=weights)[0]
            yield AdapterQuestion(name, rng.choice(PROMPTS))
