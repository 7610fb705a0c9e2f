"""Replaces a deployment's earlier revision in waves: one replica first, then twice as many each time, up to a bound.

A wave takes no more replicas out of service than the model can spare: what stays ready must hold what ran and waited in the
last minute, and some more. Replicas for which the new revision fits beside the earlier one cost nothing, so they come first.

The rest follows from what nodes report, so that a change continues after a restart of the orchestrator: every replica that
changes, or is not steady on the new revision yet, has a place in the wave. When the new revision fails on too many nodes, or
nothing moves any more, the others keep what they serve.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import structlog
from pydantic import Field

from ryzanstein.addresses import host_of
from ryzanstein.cluster import Deployment, ModelReport, Node, NodeState
from ryzanstein.orchestrator.placing.placement import Assigned, Failed, NodeNeeds

log = structlog.get_logger(__name__)

# An older node reports no revisions: it may seem ready with the new one before it has begun.
_OLDER_NODE_STARTS_S = 3.0
_DEMAND_S = 60.0
_MAX_LISTED = 4
# A node that vanished while it changed may be cut off from the orchestrator alone, and change on.
_GONE_S = 60.0
_NONE_TO_SPARE = "no replica can be spared: what stays ready would not hold what runs and waits"


@dataclass(frozen=True, slots=True)
class RolloutBounds:
    """How fast a new revision replaces an earlier one."""

    max_unavailable: Annotated[float, Field(gt=0, le=1)] = 0.10
    """Share of a model's replicas that may change at once; at least one."""
    min_ready_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long a replica must be ready before its place in the wave is free, in seconds."""
    progress_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """How long replicas may change without any progress until no further one begins, in seconds."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Share of the replicas that may fail; before the first one is ready, none may."""
    headroom: Annotated[float, Field(ge=1, le=10)] = 1.2
    """What stays ready must hold so many times what ran and waited in the last minute."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What an older node was last told to serve, and when that changed."""

    incarnation: str
    deployment: Deployment
    since: float


@dataclass(slots=True)
class _Change:
    """What is remembered of the change of one model to a revision. `turns`: nodes that were told to change, and have not."""

    revision: int
    began_at: float
    moved_at: float
    turns: set[str] = field(default_factory=set)
    ready_since: dict[str, float] = field(default_factory=dict)
    seen: object = None
    demands: deque[tuple[float, int]] = field(default_factory=deque)
    """Times, and what ran and waited then: the largest first, each later one smaller."""
    busy: set[str] = field(default_factory=set)
    """Nodes that changed at the last look, or had changed only just."""
    gone: dict[str, float] = field(default_factory=dict)
    """Those of them that are no members any more, and when that was seen."""
    full_since: float | None = None
    """When it was first seen that no replica can be spared."""
    waits_for: str = ""


class RollingChanges:
    """Which nodes may change to a new revision, by model. `now` is monotonic seconds."""

    def __init__(self, now: Callable[[], float], bounds: RolloutBounds | None = None) -> None:
        self._now = now
        self._bounds = bounds or RolloutBounds()
        self._changes: dict[str, _Change] = {}
        self._told: dict[tuple[str, str], _Told] = {}
        self._outages: dict[str, int] = {}
        self._all_known = True
        self._present: Collection[str] = ()
        self.outdated: Mapping[str, tuple[str, ...]] = {}
        """Model to the nodes that serve an earlier revision; only models that have such nodes."""

    def allow_outage(self, deployment: Deployment) -> None:
        """Lets this revision replace the earlier one though the model cannot spare a replica: one at a time then."""
        self._outages[deployment.model] = deployment.revision

    def left(self, node_id: str) -> None:
        """Notes that a node has left, so that it changes no more."""
        for change in self._changes.values():
            change.busy.discard(node_id)

    def waits_for(self, model: str) -> str:
        """Returns why no further node changes; empty: nothing is in the way."""
        change = self._changes.get(model)
        return "" if change is None else change.waits_for

    def update(
        self, assigned: Assigned, nodes: Iterable[Node], failed: Failed, needs: NodeNeeds, *, all_known: bool = True
    ) -> None:
        """Finds the nodes that serve an earlier revision, and decides which of them change now.

        None begins unless all nodes are known: one that is not back yet may be changing.
        """
        self._all_known = all_known
        by_id = {node.node_id: node for node in nodes}
        self._present = by_id.keys()
        self._told = {key: latest for key, latest in self._told.items() if key[0] in by_id}
        members: dict[Deployment, list[Node]] = defaultdict(list)
        for node_id in sorted(assigned.keys() & by_id.keys()):
            for deployment in assigned[node_id]:
                members[deployment].append(by_id[node_id])
        outdated = {d: [node for node in those if self._is_outdated(node, d)] for d, those in members.items()}
        self.outdated = {d.model: tuple(node.node_id for node in waiting) for d, waiting in outdated.items() if waiting}
        self._changes = {model: change for model, change in self._changes.items() if model in self.outdated}
        num_failed = defaultdict[str, int](int)
        for _, model in failed:
            num_failed[model] += 1
        for deployment, waiting in outdated.items():
            if waiting:
                self._advance(deployment, members[deployment], waiting, num_failed[deployment.model], needs)

    def instructed(self, node: Node, deployment: Deployment) -> Deployment:
        """Returns what a node should serve now: the deployment, or what it has until its turn."""
        change = self._changes.get(deployment.model)
        has_turn = change is not None and node.node_id in change.turns
        waits = node.node_id in self.outdated.get(deployment.model, ()) and not has_turn
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

    def _advance(
        self, deployment: Deployment, members: Sequence[Node], outdated: Sequence[Node], num_failed: int, needs: NodeNeeds
    ) -> None:
        """Gives turns to as many nodes as the wave has places for."""
        change = self._change_of(deployment)
        waiting = {node.node_id: node for node in outdated}
        # A node that has unloaded the earlier revision may report nothing for a moment.
        absent = {node.node_id for node in members if node.report(deployment.model) is None}
        change.turns &= waiting.keys() | absent
        change.turns |= {node.node_id for node in outdated if _is_changing(node, deployment)}
        loading = [node for node in members if self._is_loading(node, deployment)]
        steady = self._steady(change, deployment, members)
        self._note_progress(change, deployment, members)
        away = {node.node_id for node in outdated if _is_away(node, deployment)} - change.turns
        wave = _Wave(deployment, members, change.turns | {node.node_id for node in loading}, needs)
        needed = self._demand(change, members, deployment.model) * self._bounds.headroom
        places = min(max(1, int(self._bounds.max_unavailable * len(members))), steady + 1)
        places -= len(change.turns) + len(loading) + len(change.ready_since) - steady + self._num_gone(change)
        why = self._stopped(change, len(members), steady, num_failed, busy=bool(change.turns or loading))
        idle = not (why or change.turns or loading)
        candidates = [] if why or not self._all_known else [node for node in outdated if node.node_id not in change.turns]
        if len(members) > 1 and self._now() - change.began_at < self._bounds.min_ready_s:
            candidates = [node for node in candidates if wave.beside(node)]  # what the model can spare is not known yet
        # One that loads another revision, or serves none, has a place already.
        first = [node for node in candidates if node.node_id in away][: max(0, places)]
        chosen = [node for node in first if wave.takes(node, needed)]
        places -= len(away - {node.node_id for node in chosen})
        others = [node for node in candidates if node.node_id not in away]
        chosen += [node for node in wave.ordered(others) if places > wave.num_taken and wave.takes(node, needed)]
        if candidates and places > 0 and not chosen:
            why = _NONE_TO_SPARE
            if idle and self._may_take_anyway(change, deployment, members):
                chosen, why = wave.ordered(candidates)[:1], ""
        change.turns |= {node.node_id for node in chosen}
        change.busy = change.turns | {node.node_id for node in loading}
        if why != change.waits_for:
            log.info("change of a model", model=deployment.model, revision=deployment.revision, waits_for=why)
            change.waits_for = why

    def _num_gone(self, change: _Change) -> int:
        """Returns how many nodes vanished while they changed, and may be changing still."""
        now = self._now()
        change.gone |= dict.fromkeys(change.busy - set(self._present) - change.gone.keys(), now)
        change.gone = {n: since for n, since in change.gone.items() if n not in self._present and since > now - _GONE_S}
        return len(change.gone)

    def _may_take_anyway(self, change: _Change, deployment: Deployment, members: Sequence[Node]) -> bool:
        """Whether one node may change although the model cannot spare it, and no other one changes now.

        A single one has nobody to stand in for it, whenever that is. In a cluster that is always full the others wait for a
        while, unless an outage is allowed.
        """
        now = self._now()
        change.full_since = now if change.full_since is None else change.full_since
        waited = now - change.full_since >= self._bounds.progress_s
        return len(members) == 1 or waited or self._outages.get(deployment.model) == deployment.revision

    def _change_of(self, deployment: Deployment) -> _Change:
        known = self._changes.get(deployment.model)
        if known is None or known.revision != deployment.revision:
            known = self._changes[deployment.model] = _Change(deployment.revision, self._now(), self._now())
        return known

    def _steady(self, change: _Change, deployment: Deployment, members: Sequence[Node]) -> int:
        """Returns how many members have been ready with the new revision for long enough."""
        now = self._now()
        ready = [node.node_id for node in members if self.is_ready(node, deployment)]
        change.ready_since = {node_id: change.ready_since.get(node_id, now) for node_id in ready}
        return sum(since <= now - self._bounds.min_ready_s for since in change.ready_since.values())

    def _note_progress(self, change: _Change, deployment: Deployment, members: Sequence[Node]) -> None:
        reports = (node.report(deployment.model) for node in members)
        seen = [(r.revision, r.state, r.next_revision, r.next_state, r.progress) for r in reports if r is not None]
        if seen != change.seen:
            change.seen, change.moved_at = seen, self._now()

    def _stopped(self, change: _Change, num_members: int, steady: int, num_failed: int, *, busy: bool) -> str:
        """Returns why no further node may begin."""
        if num_failed and (not steady or num_failed > self._bounds.max_failed * num_members):
            return f"{num_failed} of {num_members} nodes failed with it"
        quiet_s = self._now() - change.moved_at
        if busy and quiet_s > self._bounds.progress_s:
            listed = ", ".join(sorted(change.turns)[:_MAX_LISTED])
            return f"no progress for {self._bounds.progress_s:g} s on {listed or 'the nodes that load it'}"
        return ""

    def _demand(self, change: _Change, members: Sequence[Node], model: str) -> int:
        """Returns the most that ran and waited at once in the last minute."""
        now, demands = self._now(), change.demands
        reports = (node.report(model) for node in members)
        current = sum(report.load.running + report.load.waiting for report in reports if report is not None)
        while demands and demands[-1][1] <= current:
            demands.pop()
        demands.append((now, current))
        while demands[0][0] < now - _DEMAND_S:
            demands.popleft()
        return demands[0][1]

    def _is_outdated(self, node: Node, deployment: Deployment) -> bool:
        report = node.report(deployment.model)
        if report is None:
            return False
        if node.plural:
            return report.revision != deployment.revision and report.state is not NodeState.FAILED
        latest = self._told_to(node, deployment)
        return latest is not None and latest.deployment.path != deployment.path

    def _is_loading(self, node: Node, deployment: Deployment) -> bool:
        """Whether a node has the new revision, but is not ready with it."""
        report = node.report(deployment.model)
        if node.plural:
            return report is not None and report.revision == deployment.revision and not self.is_ready(node, deployment)
        latest = self._told_to(node, deployment)
        if latest is None or latest.deployment.path != deployment.path:
            return False
        return self._now() - latest.since < _OLDER_NODE_STARTS_S or not self.is_ready(node, deployment)

    def _tell(self, node: Node, deployment: Deployment, waits: bool) -> Deployment:
        latest = self._told_to(node, deployment)
        if latest is not None and (waits or latest.deployment == deployment):
            return latest.deployment
        since = self._now() if latest is None or latest.deployment.path != deployment.path else latest.since
        self._told[node.node_id, deployment.model] = _Told(node.incarnation, deployment, since)
        return deployment

    def _told_to(self, node: Node, deployment: Deployment) -> _Told | None:
        latest = self._told.get((node.node_id, deployment.model))
        return latest if latest is not None and latest.incarnation == node.incarnation else None


class _Wave:
    """What of a model stays ready while nodes change. `changing` are those that were told to, or load it."""

    def __init__(self, deployment: Deployment, members: Sequence[Node], changing: Collection[str], needs: NodeNeeds) -> None:
        self._deployment, self._needs = deployment, needs
        self.num_taken = 0
        reports = (node.report(deployment.model) for node in members)
        self._usual = max((report.load.capacity for report in reports if report is not None), default=0)
        self._left = sum(map(self._capacity, members))
        self._known = self._left > 0  # some engines do not say what they hold
        self._hosts: Counter[str] = Counter()
        for node in members:
            if node.node_id in changing:
                self.take(node)

    def ordered(self, candidates: Iterable[Node]) -> list[Node]:
        """Returns nodes that lose nothing first, then one of each host before a second one of any."""
        num_on_host = self._hosts.copy()
        keyed: list[tuple[bool, int, str, Node]] = []
        for node in candidates:
            host = _host(node)
            keyed.append((not self.beside(node), num_on_host[host], node.node_id, node))
            num_on_host[host] += 1
        return [each[-1] for each in sorted(keyed, key=lambda each: each[:3])]

    def takes(self, node: Node, needed: float) -> bool:
        """Has the node change too if enough stays ready then, and returns whether it does."""
        costs = 0 if self.beside(node) else self._capacity(node)
        if self._known and costs and self._left - costs < needed:
            return False
        self.num_taken += 1
        self.take(node)
        return True

    def take(self, node: Node) -> None:
        """Counts a node as changing: without what it serves, unless it loads the new revision beside that."""
        if not self.beside(node):
            self._left -= self._capacity(node)
            self._hosts[_host(node)] += 1

    def _capacity(self, node: Node) -> int:
        """Returns what a node runs at once: of one whose model sleeps, as much as the others, because a request wakes it."""
        report = node.report(self._deployment.model)
        if report is None or report.state is NodeState.FAILED:
            return 0
        return self._usual if report.asleep else report.load.capacity if report.state is NodeState.READY else 0

    def beside(self, node: Node) -> bool:
        """Whether a node loads the new revision beside the earlier one, or has the memory for that."""
        report = node.report(self._deployment.model)
        if report is None or _is_changing(node, self._deployment):
            return report is not None
        need = self._needs.get(node.node_id, {}).get(self._deployment.path)
        if need is None or need.error:
            return False
        return sum(each.memory_bytes for each in node.models) + need.bytes <= node.memory_bytes


def kept(report: ModelReport, deployment: Deployment) -> Deployment:
    """Returns the deployment that leaves a model as a node reports it."""
    return replace(deployment, path=report.path, revision=report.revision)


def _is_changing(node: Node, deployment: Deployment) -> bool:
    report = node.report(deployment.model)
    return report is not None and 0 < report.next_revision == deployment.revision and report.next_state is not NodeState.FAILED


def _is_away(node: Node, deployment: Deployment) -> bool:
    """Whether a node changes to another revision than this, or does not serve the model now."""
    report = node.report(deployment.model)
    if report is None:
        return False
    changes = report.next_revision not in (0, deployment.revision) and report.next_state is not NodeState.FAILED
    return changes or not (report.state is NodeState.READY or report.asleep)


def _host(node: Node) -> str:
    return host_of(node.address or node.tls_address)
