"""Counts recent placements on each node; old placements fade out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

# Above this exponent the growing unit is folded back into the counts, long before a float
# overflows.
_LARGEST_EXPONENT = 50.0


class DecayedCounts:
    """A count per node in which an event of age t weighs exp(-t / window_s).

    This is a sliding window without edges that stores one number per node (forward decay: Cormode,
    Shkapenyuk, Srivastava and Xu, 2009). In a steady state a count is rate x `window_s`.
    """

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._landmark = clock()
        self._scaled: dict[str, float] = {}

    def add(self, node_id: str, amount: float = 1.0) -> None:
        # Compute the unit first: this may fold all counts.
        unit = self._unit()
        self._scaled[node_id] = self._scaled.get(node_id, 0.0) + amount * unit

    def value(self, node_id: str) -> float:
        """Returns the events in the window; 0 for a node that had none."""
        return self.values((node_id,))[node_id]

    def values(self, node_ids: Collection[str]) -> dict[str, float]:
        unit = self._unit()
        return {node_id: self._scaled.get(node_id, 0.0) / unit for node_id in node_ids}

    def faded(self, age_s: float) -> float:
        """Returns the fraction of a count that has faded after `age_s` seconds."""
        return 1.0 - math.exp(-age_s / self._window_s)

    def keep(self, node_ids: Collection[str]) -> None:
        """Forgets all other nodes."""
        for node_id in [node_id for node_id in self._scaled if node_id not in node_ids]:
            del self._scaled[node_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scaled)

    def __len__(self) -> int:
        return len(self._scaled)

    def _unit(self) -> float:
        """Returns what one event weighs now, relative to an event at the landmark."""
        exponent = (self._clock() - self._landmark) / self._window_s
        if exponent > _LARGEST_EXPONENT:
            self._landmark += exponent * self._window_s
            self._scaled = {node_id: value * math.exp(-exponent) for node_id, value in self._scaled.items()}
            return 1.0
        return math.exp(exponent)
