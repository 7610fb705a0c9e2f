"""What `ryzanstein bench control` measures: cells of a table, each on a cluster of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

MOST_REAL_ROUTERS = 2
_NODES_PER_PROCESS = 250


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """How long things take. `limit_s` bounds each wait for the cluster to converge."""

    window_s: float = 10.0
    silence_s: float = 10.0
    limit_s: float = 60.0
    streams: int = 64
    leaving: float = 0.1


@dataclass(frozen=True, slots=True)
class ControlCell:
    """A size of cluster.

    Only the first two routers are real. The others only watch, and there is always one of those, which says when all
    watchers know a change.
    """

    nodes: int
    routers: int
    models: int = 1

    @property
    def real_routers(self) -> int:
        return min(self.routers, MOST_REAL_ROUTERS)

    @property
    def watchers(self) -> int:
        return max(1, self.routers - self.real_routers)

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(f"model-{number}" for number in range(self.models))

    @property
    def processes(self) -> int:
        """Returns how many processes have the nodes, an even number: half of them fall silent."""
        return 2 * -(-self.nodes // (2 * _NODES_PER_PROCESS))

    @property
    def spans(self) -> tuple[range, ...]:
        """Returns the numbers of the nodes of each process."""
        ends = [self.nodes * number // self.processes for number in range(self.processes + 1)]
        return tuple(range(begin, end) for begin, end in pairwise(ends))

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.models} models, {self.real_routers} routers, {self.watchers} watchers"
