"""Replaces a deployment's earlier revision in waves: one replica first, then twice as many each time, up to a bound.

A wave takes no more replicas out of service than the model can spare: what stays ready must hold what ran and waited in the
last minute, and some more. Replicas for which the new revision fits beside the earlier one cost nothing, so they come first.
Where none may be away, another node takes a replica first (a surge), and loses it when enough others have changed.

The rest follows from what nodes report, so that a change continues after a restart of the orchestrator: every replica that
changes, or is not steady on the new revision yet, has a place in the wave. When the new revision fails on too many nodes, or
nothing moves any more, the others keep what they serve.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import structlog

from ryzanstein.cluster import Deployment, Node, NodeState
from ryzanstein.orchestrator.placing.halts import Halts
from ryzanstein.orchestrator.placing.placement import Assigned, Failed, NodeNeeds
from ryzanstein.orchestrator.placing.places import WavePlaces
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds
from ryzanstein.orchestrator.placing.waves import Wave, adopts, drains, is_away, is_changing, kept, loads_beside

log = structlog.get_logger(__name__)

# An older node reports no revisions: it may seem ready with the new one before it has begun.
_OLDER_NODE_STARTS_S = 3.0
_DEMAND_S = 60.0
_MAX_LISTED = 4
_UNSEEN_S = 60.0
_NONE_TO_SPARE = "no replica can be spared: what stays ready would not hold what runs and waits"


@dataclass(frozen=True, slots=True)
class _Told:
    """What an older node was last told to serve, and when that changed."""

    incarnation: str
    deployment: Deployment
    since: float


@dataclass(slots=True)
class _Change:
    """What is remembered of the change of one model to a revision, besides which nodes may be changing."""

    revision: int
    began_at: float
    moved_at: float
    ready_since: dict[str, float] = field(default_factory=dict)
    any_ready: bool = False
    """Whether a node was ready with it at any time."""
    most_members: int = 0
    """The most members that were seen at once: a share is one of them, also while some are away."""
    seen: object = None
    demands: deque[tuple[float, int]] = field(default_factory=deque)
    """Times, and what ran and waited then: the largest first, each later one smaller."""
    full_since: float | None = None
    """When it was first seen that no replica can be spared."""
    waits_for: str = ""


class RollingChanges:
    """Which nodes may change to a new revision, by model. `now` is monotonic seconds."""

    def __init__(self, now: Callable[[], float], bounds: RolloutBounds | None = None, halts: Halts | None = None) -> None:
        self._now = now
        self._bounds = bounds or RolloutBounds()
        self.halts = halts or Halts()
        self._changes: dict[str, _Change] = {}
        self._places: dict[str, WavePlaces] = {}
        self._told: dict[tuple[str, str], _Told] = {}
        self._all_known = True
        self._unseen: Mapping[str, float] = {}
        self._nodes: Mapping[str, Node] = {}
        self._assigned: Assigned = {}
        self.outdated: Mapping[str, tuple[str, ...]] = {}
        """Model to the nodes that serve an earlier revision; only models that have such nodes."""
        self._outdated: Mapping[str, frozenset[str]] = {}
        """The same for the question of each beat, whether one of a thousand nodes is among them."""

    def left(self, node_id: str) -> None:
        """Notes that a node has left, so that it changes no more."""
        for places in self._places.values():
            places.leave(node_id)

    def unseen(self, node_ids: Collection[str]) -> None:
        """Notes nodes that were members of an earlier orchestrator, and are not back: they may be changing."""
        self._unseen = dict.fromkeys(node_ids, self._now())

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
        self._all_known, self._assigned = all_known, assigned
        by_id = {node.node_id: node for node in nodes}
        self._nodes = by_id
        self._told = {key: latest for key, latest in self._told.items() if key[0] in by_id}
        members: dict[Deployment, list[Node]] = defaultdict(list)
        for node_id in sorted(assigned.keys() & by_id.keys()):
            for deployment in assigned[node_id]:
                members[deployment].append(by_id[node_id])
        outdated = {d: [node for node in those if self._is_outdated(node, d)] for d, those in members.items()}
        self.outdated = {d.model: tuple(node.node_id for node in waiting) for d, waiting in outdated.items() if waiting}
        self._outdated = {model: frozenset(node_ids) for model, node_ids in self.outdated.items()}
        self._changes = {model: change for model, change in self._changes.items() if model in self.outdated}
        self._places = {d.model: self._places.get(d.model) or WavePlaces() for d in members}
        num_failed = defaultdict[str, int](int)
        for _, model in failed:
            num_failed[model] += 1
        for deployment, waiting in outdated.items():
            if waiting:
                self._advance(deployment, members[deployment], waiting, num_failed[deployment.model], needs)

    def surges(
        self, deployments: Iterable[Deployment], holders: Mapping[str, Sequence[Node]], needs: NodeNeeds
    ) -> Mapping[str, int]:
        """Returns how many nodes more than it states each model should have now, because none of its replicas may be away.

        `holders`: the nodes that have each model, or should. Models without a surge are absent.
        """
        found = {}
        for deployment in deployments:
            alone = deployment.replicas == 1 or self._bounds.floor(deployment, deployment.replicas) >= deployment.replicas
            members = holders.get(deployment.model, ())
            if deployment.surge and alone and (surge := self._surge(deployment, members, needs)):
                found[deployment.model] = surge
        return found

    def unchangeable(self, deployment: Deployment, members: Sequence[Node], needs: NodeNeeds) -> int:
        """Returns how many replicas must stay ready if none could change unless another node stands in; 0: one could."""
        floor = self._floor(deployment, members)
        wave = Wave(deployment, members, (), self._beside(deployment, needs), floor)
        return 0 if any(wave.beside(node) or wave.leaves_floor(node) for node in members) or not members else floor

    def _floor(self, deployment: Deployment, members: Sequence[Node]) -> int:
        """Returns how many replicas must stay ready. A single one that sleeps is not missed: a request would load it anyway."""
        reports = [node.report(deployment.model) for node in members]
        if self._bounds.of(deployment).max_unavailable and any(each is not None and each.asleep for each in reports):
            return deployment.min_replicas
        return self._bounds.floor(deployment, len(members))

    def leaves(self, node: Node, deployment: Deployment) -> bool:
        """Whether a node was told to unload the earlier revision, which it may still serve."""
        if not (self._has_turn(node, deployment) and self._is_outdated(node, deployment)):
            return False
        return not (self._places[deployment.model].loads_beside(node.node_id) or is_changing(node, deployment))

    def instructed(self, node: Node, deployment: Deployment) -> Deployment:
        """Returns what a node should serve now: the deployment, or what it has until its turn."""
        waits = node.node_id in self._outdated.get(deployment.model, ()) and not self._has_turn(node, deployment)
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

    def _has_turn(self, node: Node, deployment: Deployment) -> bool:
        """Whether a node was told to change to this revision, or has it already."""
        places = self._places.get(deployment.model)
        return places is not None and places.is_told(node.node_id, deployment.revision)

    def _surge(self, deployment: Deployment, holders: Sequence[Node], needs: NodeNeeds) -> int:
        """Returns as many as have changed, and one more: the waves grow as others do."""
        halt, change = self.halts.find(deployment), self._changes.get(deployment.model)
        if halt is not None and halt.lasting:
            return 0
        outdated = [node for node in holders if not node.drain_requested and self._is_outdated(node, deployment)]
        beside = self._beside(deployment, needs)
        in_place = sum(not beside(node) for node in outdated)
        changed = 0 if change is None or change.revision != deployment.revision else len(self._known_steady(change, deployment))
        # What another orchestrator gave the model to, or is ready only just, keeps it.
        have = sum(is_changing(node, deployment) or not self._is_outdated(node, deployment) for node in holders)
        return 0 if changed >= deployment.replicas else min(deployment.surge, max(changed + 1, have), in_place)

    def _beside(self, deployment: Deployment, needs: NodeNeeds) -> Callable[[Node], bool]:
        """Returns what says whether a node loads a deployment beside its earlier revision, or could, as of now."""
        known: dict[str, bool] = {}

        def beside(node: Node) -> bool:
            if node.node_id not in known:
                known[node.node_id] = loads_beside(node, deployment, needs, self._promised(node, deployment.model, needs))
            return known[node.node_id]

        return beside

    def _promised(self, node: Node, but: str, needs: NodeNeeds) -> int:
        """Returns the memory that a node's other models are about to take, besides what they have now."""
        promised = 0
        for deployment in self._assigned.get(node.node_id, ()):
            report = node.report(deployment.model)
            need = needs.get(node.node_id, {}).get(deployment.path)
            if deployment.model == but or need is None:
                continue
            if report is None or is_changing(node, deployment):
                promised += need.bytes
            elif self._has_turn(node, deployment) and report.revision != deployment.revision and not adopts(report, deployment):
                beside = self._places[deployment.model].loads_beside(node.node_id)
                promised += need.bytes if beside else max(0, need.bytes - report.memory_bytes)
        return promised

    def _advance(
        self, deployment: Deployment, members: Sequence[Node], outdated: Sequence[Node], num_failed: int, needs: NodeNeeds
    ) -> None:
        """Gives turns to as many nodes as the wave has places for."""
        bounds, change = self._bounds.of(deployment), self._change_of(deployment)
        steady, places = self._steady(change, deployment, members), self._places[deployment.model]
        # A node that has unloaded the earlier revision may report nothing for a moment, as one that is to have its first one.
        waiting = {node.node_id for node in outdated} | {n.node_id for n in members if n.report(deployment.model) is None}
        shows = partial(self._shows, change.ready_since.keys() - steady, deployment)
        places.look(deployment, members, self._nodes, waiting=waiting, shows=shows, now=self._now())
        changing = places.told(deployment.revision) & {node.node_id for node in members} - change.ready_since.keys()
        self._note_progress(change, deployment, members, changing)
        floor = self._floor(deployment, members)
        wave = Wave(deployment, members, changing, self._beside(deployment, needs), floor)
        needed = self._demand(change, members, deployment.model) * bounds.headroom
        spare = min(self._bounds.places(deployment, len(members)), len(steady) + 1)
        spare -= len(places.node_ids | self._not_back().keys())
        why = self._halted(change, deployment, members, num_failed, busy=changing)
        free = [node for node in outdated if node.node_id not in changing and not drains(node, deployment.model)]
        candidates = [] if why or not self._all_known else free
        if (len(members) > 1 or deployment.surge) and self._now() - change.began_at < bounds.min_ready_s:
            # What the model can spare is not known yet, and other nodes may still measure whether they can stand in.
            candidates = [node for node in candidates if wave.beside(node)]
        if 0 < deployment.replicas <= len(steady):
            candidates = []  # enough have changed: the others lose the model
        chosen = self._choose(deployment, wave, free, candidates, spare=spare, needed=needed)
        change.full_since = None if chosen else change.full_since
        if candidates and spare > 0 and not chosen:
            why = _NONE_TO_SPARE if any(map(wave.leaves_floor, candidates)) else self._at_floor(deployment, floor)
            if not changing and self._may_take_anyway(change, deployment, members):
                chosen = [node for node in wave.ordered(candidates) if wave.leaves_floor(node)][:1]
                why = "" if chosen else why
        for node in chosen:
            places.tell(node.node_id, deployment.revision, beside=wave.beside(node))
        if why != change.waits_for:
            log.info("change of a model", model=deployment.model, revision=deployment.revision, waits_for=why)
            change.waits_for = why

    def _choose(
        self,
        deployment: Deployment,
        wave: Wave,
        free: Iterable[Node],
        candidates: Sequence[Node],
        *,
        spare: int,
        needed: float,
    ) -> list[Node]:
        """Returns the candidates that change now. First come those that have a place already; `spare` more are left.

        While there are too many, one that may serve after all gets no turn: it would be one more.
        """
        held = self._places[deployment.model].node_ids
        away = {node.node_id for node in free if node.node_id in held and is_away(node, deployment)}
        doubtful = {node.node_id: node for node in free if node.node_id in held and node.node_id not in away}
        chosen = wave.choose([node for node in candidates if node.node_id in away], spare + len(away), needed)
        if spare >= 0:
            again = wave.choose([node for node in candidates if node.node_id in doubtful], len(doubtful), needed)
            chosen += [doubtful.pop(node.node_id) for node in again]
        for node in doubtful.values():
            wave.take(node)  # it may be unloading what it serves
        return chosen + wave.choose([node for node in candidates if node.node_id not in held], spare, needed)

    def _shows(self, unsteady: Set[str], deployment: Deployment, node: Node) -> int | None:
        """Returns the revision to which a node changes by its report, or has changed only just; None: it does not."""
        report = node.report(deployment.model)
        if report is None:
            return deployment.revision if node.plural else None
        if node.node_id in unsteady or is_changing(node, deployment) or self._is_loading(node, deployment):
            return deployment.revision
        if self._is_outdated(node, deployment) and is_away(node, deployment) and not drains(node, deployment.model):
            return report.next_revision or report.revision
        return None

    def _not_back(self) -> Mapping[str, float]:
        """Returns the nodes that were members of an earlier orchestrator, and may be changing still."""
        since = self._now() - _UNSEEN_S
        self._unseen = {n: at for n, at in self._unseen.items() if n not in self._nodes and at > since}
        return self._unseen

    def _may_take_anyway(self, change: _Change, deployment: Deployment, members: Sequence[Node]) -> bool:
        """Whether one node may change although the model cannot spare it, and no other one changes now.

        A single one has nobody to stand in for it, whenever that is. In a cluster that is always full the others wait for a
        while, unless an outage is allowed. Fewer than the floor are left in no case.
        """
        now = self._now()
        change.full_since = now if change.full_since is None else change.full_since
        waited = now - change.full_since >= self._bounds.of(deployment).progress_s
        return len(members) == 1 or waited or deployment.allows_outage

    def _change_of(self, deployment: Deployment) -> _Change:
        known = self._changes.get(deployment.model)
        if known is None or known.revision != deployment.revision:
            known = _Change(deployment.revision, self._now(), self._now())
            self._changes[deployment.model] = known
        return known

    def _steady(self, change: _Change, deployment: Deployment, members: Sequence[Node]) -> Set[str]:
        """Returns the members that have been ready with the new revision for long enough."""
        now = self._now()
        ready = [node.node_id for node in members if self.is_ready(node, deployment)]
        change.ready_since = {node_id: change.ready_since.get(node_id, now) for node_id in ready}
        change.any_ready |= bool(ready)
        change.most_members = max(change.most_members, len(members))
        return self._known_steady(change, deployment)

    def _known_steady(self, change: _Change, deployment: Deployment) -> Set[str]:
        since = self._now() - self._bounds.of(deployment).min_ready_s
        return {node_id for node_id, each in change.ready_since.items() if each <= since}

    def _note_progress(self, change: _Change, deployment: Deployment, members: Sequence[Node], busy: set[str]) -> None:
        """Notes when something moved of what changes: others that come and go are no progress."""
        reports = {node.node_id: node.report(deployment.model) for node in members if node.node_id in busy}
        moving = [(r.revision, r.state, r.next_revision, r.next_state, r.progress) for r in reports.values() if r is not None]
        seen = (moving, sorted(reports), sorted(change.ready_since))
        if seen == change.seen:
            return
        halt = self.halts.find(deployment)
        if change.seen is not None and self._all_known and halt is not None and not halt.lasting:
            self.halts.lift(deployment.model)
        change.seen, change.moved_at = seen, self._now()

    def _halted(
        self, change: _Change, deployment: Deployment, members: Sequence[Node], num_failed: int, *, busy: set[str]
    ) -> str:
        """Returns why no further node may begin. What is found is a halt, which another orchestrator knows of, too.

        Nothing is judged by some of the nodes, while others are not back yet.
        """
        if self._all_known:
            if unlike := self._unlike(change, deployment, members):
                self.halts.put(deployment, unlike, lasting=True)
            self._judge(change, deployment, num_failed, busy)
        halt = self.halts.find(deployment)
        return "" if halt is None else halt.reason

    def _judge(self, change: _Change, deployment: Deployment, num_failed: int, busy: set[str]) -> None:
        bounds, halt, num_members = self._bounds.of(deployment), self.halts.find(deployment), change.most_members
        if num_failed and (not change.any_ready or num_failed > bounds.max_failed * num_members):
            self.halts.put(deployment, f"{num_failed} of {num_members} nodes failed with it", lasting=True)
        elif halt is None and busy and self._now() - change.moved_at > bounds.progress_s:
            listed = ", ".join(sorted(busy)[:_MAX_LISTED])
            self.halts.put(deployment, f"no progress for {bounds.progress_s:g} s on {listed}", lasting=False)
        elif halt is not None and not (halt.lasting or busy):
            self.halts.lift(deployment.model)  # it moved while no orchestrator saw it

    def _unlike(self, change: _Change, deployment: Deployment, members: Sequence[Node]) -> str:
        """Returns which members have been ready with the new revision, but of different files; empty: none are known to."""
        steady, first = self._known_steady(change, deployment), dict[str, str]()
        for node in members:
            report = node.report(deployment.model)
            if report is not None and node.node_id in steady and report.state is NodeState.READY and report.content:
                first.setdefault(report.content, node.node_id)
        if len(first) < 2:
            return ""
        one, other, *_ = first.values()
        return f"{one} and {other} have different files of this revision: make them the same, and deploy it with --reload"

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

    def floor_reason(self, deployment: Deployment, floor: int) -> tuple[str, str]:
        """Returns why so many replicas must stay ready, and what lets fewer do."""
        if floor <= deployment.min_replicas:
            return f"min_replicas is {deployment.min_replicas}", "a lower --min-nodes lets fewer stay ready"
        if not self._bounds.of(deployment).max_unavailable:
            return "rollout.max_unavailable is 0", "--allow-outage lets it go on"
        return "it has one replica", "--allow-outage lets it be away while it loads"

    def _at_floor(self, deployment: Deployment, floor: int) -> str:
        what, remedy = self.floor_reason(deployment, floor)
        return f"{what}: no node has room to load it beside the earlier one, or to stand in; {remedy}"
