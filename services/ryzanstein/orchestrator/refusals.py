"""Records which nodes failed to serve which deployment, so that a broken one stops moving.

A node that failed returns to its own model and no longer reports the failure. Without a record, the
placement would choose it again, and a broken model would take healthy nodes out of service in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ryzanstein.cluster import Deployment, Node, NodeState

# After this time a node may have been repaired, or its ranks recovered.
REMEMBER_S = 600.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure of one process of the node, until `expires` on the monotonic clock."""

    incarnation: str
    deployment: Deployment
    expires: float


class Refusals:
    """The failures of nodes, by node and model. `now` is monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failures: dict[tuple[str, str], _Failure] = {}

    def note(self, nodes: Iterable[Node], placed: Mapping[str, Deployment]) -> None:
        """Records the nodes that report FAILED with the deployment that they were given."""
        for node in nodes:
            deployment = placed.get(node.node_id)
            if deployment is not None and node.state is NodeState.FAILED and node.model in ("", deployment.model):
                failure = _Failure(node.incarnation, deployment, self._now() + REMEMBER_S)
                self._failures[node.node_id, deployment.model] = failure

    def of(self, deployments: Collection[Deployment], nodes: Iterable[Node]) -> frozenset[tuple[str, str]]:
        """Returns the nodes and models of failures that still count; forgets the others.

        A restart of the node, another directory and the passage of time each end a failure.
        """
        incarnations = {node.node_id: node.incarnation for node in nodes}
        now = self._now()
        self._failures = {
            key: failure
            for key, failure in self._failures.items()
            if failure.deployment in deployments and failure.expires > now and incarnations.get(key[0]) == failure.incarnation
        }
        return frozenset(self._failures)

    def forget(self, model: str) -> None:
        """Forgets the failures of a model, because it is deployed again."""
        self._failures = {key: failure for key, failure in self._failures.items() if key[1] != model}
