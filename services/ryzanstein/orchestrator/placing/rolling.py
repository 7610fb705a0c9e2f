"""Replaces a deployment's earlier revision on one node after the other.

All that is remembered is whose turn it is; the rest follows from what nodes report, so that a roll
continues after a restart of the orchestrator. The next turn comes when every node with the new
revision is ready. When the new revision failed on a node the others keep what they serve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ryzanstein.cluster import Deployment, ModelReport, Node, NodeState
from ryzanstein.orchestrator.placing.placement import Assigned, Failed

# An older node reports no revisions: it may seem ready with the new one before it has begun.
_OLDER_NODE_STARTS_S = 3.0


@dataclass(frozen=True, slots=True)
class _Assigned:
    """What an older node was last told to serve, and when that changed."""

    incarnation: str
    deployment: Deployment
    since: float


class RollingChanges:
    """Whose turn it is to change, by model. `now` is monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._turns: dict[str, str] = {}
        self._assigned: dict[tuple[str, str], _Assigned] = {}
        self.outdated: Mapping[str, tuple[str, ...]] = {}
        """Model to the nodes that serve an earlier revision; only models that have such nodes."""

    def update(self, assigned: Assigned, nodes: Iterable[Node], failed: Failed) -> None:
        """Finds the nodes that serve an earlier revision, and gives one per model its turn."""
        by_id = {node.node_id: node for node in nodes}
        self._assigned = {key: latest for key, latest in self._assigned.items() if key[0] in by_id}
        members: dict[Deployment, list[Node]] = defaultdict(list)
        for node_id in sorted(assigned.keys() & by_id.keys()):
            for deployment in assigned[node_id]:
                members[deployment].append(by_id[node_id])
        outdated = {d: [node for node in those if self._is_outdated(node, d)] for d, those in members.items()}
        stopped = {model for _, model in failed}
        for deployment, waiting in outdated.items():
            self._turn(deployment, members[deployment], waiting, deployment.model in stopped)
        self.outdated = {d.model: tuple(node.node_id for node in waiting) for d, waiting in outdated.items() if waiting}
        self._turns = {model: node_id for model, node_id in self._turns.items() if model in self.outdated}

    def instructed(self, node: Node, deployment: Deployment) -> Deployment:
        """Returns what a node should serve now: the deployment, or what it has until its turn."""
        waits = node.node_id in self.outdated.get(deployment.model, ()) and self._turns.get(deployment.model) != node.node_id
        if not node.plural:
            return self._tell(node, deployment, waits)
        report = node.report(deployment.model)
        return kept(report, deployment) if waits and report is not None else deployment

    def is_ready(self, node: Node, deployment: Deployment) -> bool:
        """Whether a node serves this revision, or will as soon as a request comes."""
        report = node.report(deployment.model)
        if report is None or not (report.state is NodeState.READY or report.asleep):
            return False
        return report.revision == deployment.revision if node.plural else not self._is_outdated(node, deployment)

    def _turn(self, deployment: Deployment, members: Sequence[Node], outdated: Sequence[Node], stopped: bool) -> None:
        model = deployment.model
        if self._turns.get(model) in [node.node_id for node in outdated]:
            return
        self._turns.pop(model, None)
        changing = [node for node in outdated if _is_changing(node, deployment)]
        if changing:  # its turn came before a restart of this process
            self._turns[model] = changing[0].node_id
        elif outdated and not stopped and not any(self._is_loading(node, deployment) for node in members):
            self._turns[model] = outdated[0].node_id

    def _is_outdated(self, node: Node, deployment: Deployment) -> bool:
        report = node.report(deployment.model)
        if report is None:
            return False
        if node.plural:
            return report.revision != deployment.revision and report.state is not NodeState.FAILED
        latest = self._assigned_to(node, deployment)
        return latest is not None and latest.deployment.path != deployment.path

    def _is_loading(self, node: Node, deployment: Deployment) -> bool:
        """Whether a node has the new revision, but is not ready with it."""
        report = node.report(deployment.model)
        if node.plural:
            return report is not None and report.revision == deployment.revision and not self.is_ready(node, deployment)
        latest = self._assigned_to(node, deployment)
        if latest is None or latest.deployment.path != deployment.path:
            return False
        return self._now() - latest.since < _OLDER_NODE_STARTS_S or not self.is_ready(node, deployment)

    def _tell(self, node: Node, deployment: Deployment, waits: bool) -> Deployment:
        latest = self._assigned_to(node, deployment)
        if latest is not None and (waits or latest.deployment == deployment):
            return latest.deployment
        since = self._now() if latest is None or latest.deployment.path != deployment.path else latest.since
        self._assigned[node.node_id, deployment.model] = _Assigned(node.incarnation, deployment, since)
        return deployment

    def _assigned_to(self, node: Node, deployment: Deployment) -> _Assigned | None:
        latest = self._assigned.get((node.node_id, deployment.model))
        return latest if latest is not None and latest.incarnation == node.incarnation else None


def kept(report: ModelReport, deployment: Deployment) -> Deployment:
    """Returns the deployment that leaves a model as a node reports it."""
    return replace(deployment, path=report.path, revision=report.revision)


def _is_changing(node: Node, deployment: Deployment) -> bool:
    report = node.report(deployment.model)
    return report is not None and 0 < report.next_revision == deployment.revision and report.next_state is not NodeState.FAILED
