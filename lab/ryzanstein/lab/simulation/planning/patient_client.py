"""A client that waits for its answers: it never leaves or cancels, and resubmits what failed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ryzanstein.lab.simulation.planning.plan import ClientPlan


def patient_client(
    rng: random.Random, number: int, *, thinks_s: Sequence[float], most_tokens: Sequence[int], deadline_s: float
) -> ClientPlan:
    """Draws a client. `thinks_s` and `most_tokens` are what its pauses and the bounds of its answers are drawn from."""
    return ClientPlan(
        number,
        think_s=rng.choice(thinks_s),
        tokens=(1, rng.choice(most_tokens)),
        session=rng.random() < 0.5,
        leaves=0.0,
        cancels=0.0,
        deadline_s=deadline_s,
        short_deadline=0.0,
        choices=1,
        burst=1,
        loses_stream=rng.choice((0.0, 0.05)),
        resubmits=True,
    )
