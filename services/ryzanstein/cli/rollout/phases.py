"""What a node makes of a deployment, as its last report shows it."""

from __future__ import annotations

from enum import Enum

from ryzanstein.cluster import Deployment, ModelReport, Node, NodeState


class Phase(Enum):
    """What an assigned node does. The values are for people."""

    ASSIGNED = "is assigned"
    EARLIER = "still serves the earlier version"
    ALONGSIDE = "loads it beside the earlier version"
    FINISHING = "finishes its work first"
    LOADING = "loads"
    READY = "is ready"
    FAILED = "failed"
    REFUSED = "refused it and goes on with the earlier version"
    LEFT = "is no longer assigned"
    GONE = "is no member now"


_BY_STATE = {
    NodeState.STARTING: Phase.LOADING,
    NodeState.RECOVERING: Phase.LOADING,
    NodeState.DRAINING: Phase.FINISHING,
    NodeState.FAILED: Phase.FAILED,
    NodeState.READY: Phase.READY,
}
_FINAL = frozenset({Phase.READY, Phase.FAILED, Phase.REFUSED})


def phase_of(node: Node, deployment: Deployment) -> Phase:
    """Returns the phase that a single report shows; ASSIGNED when it shows nothing of the deployment."""
    if not node.plural:
        ready_with_another = node.state is NodeState.READY and node.model != deployment.model
        return Phase.ASSIGNED if ready_with_another else _BY_STATE.get(node.state, Phase.ASSIGNED)
    report = node.report(deployment.model)
    if report is None:
        return Phase.ASSIGNED
    if report.revision == deployment.revision:
        if report.asleep and report.state is not NodeState.FAILED:
            return Phase.READY  # a request wakes it
        return _BY_STATE.get(report.state, Phase.ASSIGNED)
    return _phase_before(report, deployment)


def reported(node: Node, model: str) -> object:
    """Returns what a change of phase shows in: two reports that are equal in it are the same to a rollout."""
    report = node.report(model) if node.plural else None
    if report is None:
        return node.plural, node.state, "" if node.plural else node.model
    return report.revision, report.state, report.next_revision, report.next_state


def reason_in(node: Node, deployment: Deployment) -> str:
    """Returns why the deployment failed on a node, if the node's report says so."""
    report = node.report(deployment.model) if node.plural else None
    if report is None:
        return ""
    return report.reason if report.revision == deployment.revision else report.next_reason


def is_final(phase: Phase | None) -> bool:
    """Whether a node that is in this phase has done what it can."""
    return phase in _FINAL


def _phase_before(report: ModelReport, deployment: Deployment) -> Phase:
    """Returns the phase of a node that has another version than the wanted one."""
    if report.next_revision == deployment.revision:
        return Phase.REFUSED if report.next_state is NodeState.FAILED else Phase.ALONGSIDE
    if report.state is NodeState.DRAINING:
        return Phase.FINISHING
    is_this = not report.revision and report.path == deployment.path  # it was started with this very directory
    return Phase.ASSIGNED if is_this else Phase.EARLIER
