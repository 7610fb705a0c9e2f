"""The simulated ranks of a node, by the models that they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context

from ryzanstein.lab.simulation.ranks.ranks import SimulatedRanks


class NodeRanks:
    """The ranks of all models of a node, across all restarts.

    `make` returns the ranks of a model; it is called once for each. They run in the context
    variables of the code that creates this object.
    """

    def __init__(self, make: Callable[[str], SimulatedRanks]) -> None:
        self._make = make
        self._context = copy_context()
        self._by_model: dict[str, SimulatedRanks] = {}

    def __iter__(self) -> Iterator[SimulatedRanks]:
        yield from self._by_model.values()

    def of(self, model: str) -> SimulatedRanks:
        """Returns the ranks of a model, also before the node has started any."""
        if model not in self._by_model:
            self._by_model[model] = self._context.copy().run(self._make, model)
        return self._by_model[model]

    def agent_died(self) -> None:
        """Ends all ranks silently, see `SimulatedRanks.agent_died`."""
        for ranks in self:
            ranks.agent_died()
