"""Records which nodes failed to serve which deployment, so that a broken one stops moving.

A node that failed returns to its own model and no longer reports the failure. Without a record, the
placement would choose it again, and a broken model would take healthy nodes out of service in turn.
A replica that comes no further (`replica_leases`) has failed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ryzanstein.cluster import Deployment, Node, NodeState
from ryzanstein.orchestrator.placing.placement import Assigned
from ryzanstein.orchestrator.state.stored import StoredRefusal

# After this time a node may have been repaired, or its ranks recovered.
REMEMBER_S = 600.0
# How often what is left of it is stored: a restart makes it longer by no more, and by the time in which nobody ran.
_STORE_S = 60.0

Expired = Callable[[Node, Deployment], "str | None"]
"""Returns why a replica comes no further; None: it does, as far as is known. See `replica_leases`."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure of one process of the node, until `expires` on the monotonic clock."""

    incarnation: str
    revision: int
    expires: float
    reason: str


class Refusals:
    """The failures of nodes, by node and model. `now` is monotonic seconds."""

    def __init__(self, now: Callable[[], float], stored: Iterable[StoredRefusal] = ()) -> None:
        self._now = now
        self._failures = {
            (each.node_id, each.model): _Failure(
                each.incarnation, each.revision, now() + max(0.0, min(each.left_s, REMEMBER_S)), each.reason
            )
            for each in stored
        }
        self._present: frozenset[tuple[str, str]] = frozenset()
        self._written = self._facts()
        self._written_at = now()

    def unwritten(self) -> tuple[StoredRefusal, ...] | None:
        """Returns what to store; None: it is stored as it is."""
        now = self._now()
        if self._facts() == self._written and not (self._failures and now - self._written_at >= _STORE_S):
            return None
        return tuple(
            StoredRefusal(node_id, model, each.incarnation, each.revision, max(0.0, each.expires - now), each.reason)
            for (node_id, model), each in self._failures.items()
        )

    def wrote(self, stored: Iterable[StoredRefusal]) -> None:
        """Notes what is stored now."""
        self._written = {(each.node_id, each.model): (each.incarnation, each.revision, each.reason) for each in stored}
        self._written_at = self._now()

    def _facts(self) -> dict[tuple[str, str], tuple[str, int, str]]:
        return {key: (each.incarnation, each.revision, each.reason) for key, each in self._failures.items()}

    def note(self, nodes: Iterable[Node], assigned: Assigned, expired: Expired = lambda node, deployment: None) -> None:
        """Records the nodes that report FAILED with a deployment that they were given, or come no further with it.

        A node that is ready with it after all has not failed.
        """
        for node in nodes:
            for deployment in assigned.get(node.node_id, ()):
                key, reason = (node.node_id, deployment.model), _failure(node, deployment)
                reason = expired(node, deployment) if reason is None else reason
                if reason is not None:
                    self._failures[key] = _Failure(node.incarnation, deployment.revision, self._now() + REMEMBER_S, reason)
                elif _serves(node, deployment):
                    self._failures.pop(key, None)

    def of(self, deployments: Collection[Deployment], nodes: Iterable[Node]) -> frozenset[tuple[str, str]]:
        """Returns the nodes and models of failures that still count; forgets the others.

        A restart of the node, another revision and the passage of time each end a failure. Those of nodes
        that are away are kept: after a restart of the orchestrator all are, at first.
        """
        revisions = {deployment.model: deployment.revision for deployment in deployments}
        incarnations = {node.node_id: node.incarnation for node in nodes}
        now = self._now()
        self._failures = {
            key: failure
            for key, failure in self._failures.items()
            if revisions.get(key[1]) == failure.revision
            and incarnations.get(key[0], failure.incarnation) == failure.incarnation
            and failure.expires > now
        }
        self._present = frozenset(key for key in self._failures if key[0] in incarnations)
        return self._present

    def reasons(self, model: str) -> dict[str, str]:
        """Returns why nodes failed to serve a model, by node id."""
        return {key[0]: self._failures[key].reason for key in sorted(self._present & self._failures.keys()) if key[1] == model}

    def forget(self, model: str) -> None:
        """Forgets the failures of a model, because it is deployed again."""
        self._failures = {key: failure for key, failure in self._failures.items() if key[1] != model}


def _failure(node: Node, deployment: Deployment) -> str | None:
    """Returns why the node failed to serve this revision of a deployment; None if it did not."""
    if not node.plural:
        failed = node.state is NodeState.FAILED and node.model in ("", deployment.model)
        return "" if failed else None
    report = node.report(deployment.model)
    if report is None:
        return None
    if report.state is NodeState.FAILED and report.revision == deployment.revision:
        return report.reason
    if report.next_state is NodeState.FAILED and report.next_revision == deployment.revision:
        return report.next_reason
    return None


def _serves(node: Node, deployment: Deployment) -> bool:
    report = node.report(deployment.model) if node.plural else None
    return report is not None and report.state is NodeState.READY and report.revision == deployment.revision
