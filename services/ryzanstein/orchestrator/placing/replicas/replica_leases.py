"""Which replicas come no further: a lease for each model that a node starts.

A node's beats say that its agent lives, not that a model will ever be ready. So they also carry, for each model that starts, a
number that grows while the node sees it move. A replica whose number stands still for a lease has expired. A node ends most
starts that hang by itself, and sooner; what it does not watch, such as a read from a disk that never answers, ends here.

Only time in which reports arrive counts: a node that is cut off, and an orchestrator that begins to lead, know nothing of
what moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ryzanstein.cluster import Deployment, Node


@dataclass(slots=True)
class _Start:
    """The start of a revision on a node, and for how many seconds of reports it has stood still."""

    revision: int
    number: int
    still_s: float = 0.0


@dataclass(slots=True)
class _NodeStarts:
    """The starts of one process of a node, by model, as of its last report."""

    incarnation: str
    reported_at: float
    starts: dict[str, _Start] = field(default_factory=dict)


class ReplicaLeases:
    """The leases of the replicas that are being started.

    `lease_s`: how long one may stand still. Between two reports at most `longest_gap_s` count. `now` is monotonic seconds.
    """

    def __init__(self, now: Callable[[], float], lease_s: float, longest_gap_s: float) -> None:
        self._now, self._lease_s, self._longest_gap_s = now, lease_s, longest_gap_s
        self._nodes: dict[str, _NodeStarts] = {}

    def reported(self, node: Node, starts: Mapping[str, int], told: Iterable[Deployment]) -> list[Deployment]:
        """Takes a node's report of what it starts; returns the deployments whose replica there has expired by it.

        `told`: what the node was told to serve. What it does not list is ready, or cannot be watched: it never expires.
        """
        now, known = self._now(), self._nodes.get(node.node_id)
        if known is None or known.incarnation != node.incarnation:
            known = _NodeStarts(node.incarnation, now)
        passed_s, known.reported_at = min(now - known.reported_at, self._longest_gap_s), now
        before, known.starts, expired = known.starts, {}, []
        for deployment in told:
            if (number := starts.get(deployment.model)) is None:
                continue
            start = before.get(deployment.model)
            if start is None or (start.revision, start.number) != (deployment.revision, number):
                start = _Start(deployment.revision, number)
            elif not self._is_over(start):
                start.still_s += passed_s
                expired += [deployment] if self._is_over(start) else []
            known.starts[deployment.model] = start
        if known.starts:
            self._nodes[node.node_id] = known
        else:
            self._nodes.pop(node.node_id, None)
        return expired

    def reason(self, node: Node, deployment: Deployment) -> str | None:
        """Returns why a replica has expired; None: it has not, or moves again."""
        known = self._nodes.get(node.node_id)
        if known is None or known.incarnation != node.incarnation:
            return None
        start = known.starts.get(deployment.model)
        if start is None or start.revision != deployment.revision or not self._is_over(start):
            return None
        return f"its start showed no progress for {self._lease_s:g} s"

    def forget(self, node_id: str) -> None:
        """Forgets a node that is no member any more."""
        self._nodes.pop(node_id, None)

    def _is_over(self, start: _Start) -> bool:
        return start.still_s >= self._lease_s
