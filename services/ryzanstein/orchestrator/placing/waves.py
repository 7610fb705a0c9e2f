"""What of a model stays ready while nodes change, and which nodes change next. Plain logic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ryzanstein.cluster import MODEL_CHANGES, Deployment, ModelReport, Node, NodeState
from ryzanstein.orchestrator.placing.placement import NodeNeeds


class Wave:
    """The members of a deployment while some change. `changing` are those that were told to, or load it.

    `beside` says which nodes load the new revision beside the earlier one, or have the memory for that. `floor` of the members
    stay ready.
    """

    def __init__(
        self,
        deployment: Deployment,
        members: Sequence[Node],
        changing: Collection[str],
        beside: Callable[[Node], bool],
        floor: int,
    ) -> None:
        self._deployment, self.beside, self._floor = deployment, beside, floor
        reports = (node.report(deployment.model) for node in members)
        self._usual = max((report.load.capacity for report in reports if report is not None), default=0)
        self._left = sum(map(self._capacity, members))
        self._known = self._left > 0  # some engines do not say what they hold
        self._ready = sum(serves(node, deployment.model) for node in members)
        self._hosts: Counter[str] = Counter()
        for node in members:
            if node.node_id in changing:
                self.take(node)

    def ordered(self, candidates: Iterable[Node]) -> list[Node]:
        """Returns nodes that lose nothing first, then one of each host before a second one of any."""
        num_on_host = self._hosts.copy()
        keyed: list[tuple[bool, int, str, Node]] = []
        for node in candidates:
            host = node.machine
            keyed.append((not self.beside(node), num_on_host[host], node.node_id, node))
            num_on_host[host] += 1
        return [each[-1] for each in sorted(keyed, key=lambda each: each[:3])]

    def choose(self, candidates: Iterable[Node], places: int, needed: float) -> list[Node]:
        """Returns at most `places` nodes that change too: enough stays ready then.

        No host loses a second replica while another has a candidate for its first, also if that cannot be spared now.
        """
        chosen: list[Node] = []
        ordered = self.ordered(candidates)
        on_host = Counter(node.machine for node in ordered)
        least = min((self._hosts[host] for host in on_host), default=0)
        for node in ordered:
            if len(chosen) >= places:
                break
            if self.beside(node) or (self._hosts[node.machine] <= least and self._spares(node, needed)):
                chosen.append(node)
                self.take(node)
                on_host[node.machine] -= 1
                least = min((self._hosts[host] for host, num in on_host.items() if num), default=0)
        return chosen

    def leaves_floor(self, node: Node) -> bool:
        """Whether enough replicas are ready without this one. One that is not ready is not missed."""
        return not serves(node, self._deployment.model) or self._ready - 1 >= self._floor

    def take(self, node: Node) -> None:
        """Counts a node as changing: without what it serves, unless it loads the new revision beside that."""
        if not self.beside(node):
            self._left -= self._capacity(node)
            self._ready -= serves(node, self._deployment.model)
            self._hosts[node.machine] += 1

    def _spares(self, node: Node, needed: float) -> bool:
        costs = self._capacity(node)
        return self.leaves_floor(node) and not (self._known and costs and self._left - costs < needed)

    def _capacity(self, node: Node) -> int:
        """Returns what a node runs at once: of one whose model sleeps, as much as the others, because a request wakes it."""
        report = node.report(self._deployment.model)
        if report is None or report.state is NodeState.FAILED:
            return 0
        return self._usual if report.asleep else report.load.capacity if report.state is NodeState.READY else 0


def serves(node: Node, model: str) -> bool:
    """Whether a node answers requests for a model, of any revision. One that sleeps does: a request wakes it."""
    report = node.report(model)
    return report is not None and (report.state is NodeState.READY or (report.asleep and report.state is not NodeState.FAILED))


def loads_beside(node: Node, deployment: Deployment, needs: NodeNeeds, promised_bytes: int = 0) -> bool:
    """Whether a node loads a revision beside the one that it has, or has the memory for that.

    What it was started with from the same directory it only gives the number of the revision. A model that sleeps has no ranks
    beside which others could be loaded: they would take its place. `promised_bytes`: what its other models are about to take.
    """
    report = node.report(deployment.model)
    if report is None or is_changing(node, deployment):
        return report is not None
    if adopts(report, deployment):
        return True
    need = needs.get(node.node_id, {}).get(deployment.path)
    if report.asleep or need is None or need.error:
        return False
    return sum(each.memory_bytes for each in node.models) + promised_bytes + need.bytes <= node.memory_bytes


def adopts(report: ModelReport, deployment: Deployment) -> bool:
    """Whether a node has the files of a deployment since it was started, so that it only gives them its revision."""
    return report.started_with and not report.revision and report.path == deployment.path


def kept(report: ModelReport, deployment: Deployment) -> Deployment:
    """Returns the deployment that leaves a model as a node reports it."""
    return replace(deployment, path=report.path, revision=report.revision)


def is_changing(node: Node, deployment: Deployment) -> bool:
    """Whether a node loads the revision beside the one that it has."""
    report = node.report(deployment.model)
    return report is not None and 0 < report.next_revision == deployment.revision and report.next_state is not NodeState.FAILED


def is_away(node: Node, deployment: Deployment) -> bool:
    """Whether a node changes to another revision than this, or does not serve the model now."""
    report = node.report(deployment.model)
    if report is None:
        return False
    changes = report.next_revision not in (0, deployment.revision) and report.next_state is not NodeState.FAILED
    return changes or not serves(node, deployment.model)


def drains(node: Node, model: str) -> bool:
    """Whether a node takes no work, and not because of a change: it would load a revision and stay so."""
    report = node.report(model)
    return report is not None and report.state is NodeState.DRAINING and MODEL_CHANGES not in report.reason
