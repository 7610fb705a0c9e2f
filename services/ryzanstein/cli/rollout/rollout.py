"""How far a deployment is, from what the orchestrator reports again and again. It makes no calls.

A node learns its deployment from the answer to a beat, and its next beat shows what it made of it.
A node may be READY or FAILED from before, even under the same name. So these two count only when
two beats in a row, since the node was assigned, report them. A node of several models reports the
revision of each; an older node does not, and has only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ryzanstein.cli.rollout.deployments import Assignments, names
from ryzanstein.cli.rollout.phases import Phase, is_final, phase_of, reason_in, reported
from ryzanstein.cli.rollout.ready_models import ready_models
from ryzanstein.cli.rollout.shortages import why_not_more
from ryzanstein.cluster import Deployment, Node

STEADY_S = 2.0  # longer than a node takes to appear, or to be assigned in another's place
_WAVES_S = 30.0  # longer than the pause between two waves, which is `min_ready_s`
_BEATS = 2
_SILENT = "it does not say why"
_MAX_FAILURES = 3  # the orchestrator tries other nodes, again and again


@dataclass(slots=True)
class _Sighting:
    """The beats of an assigned node that report the same: how many, and the last one.

    `changed`: the node once reported something else since it was assigned.
    """

    node: Node
    beats: int
    phase: Phase | None = None
    changed: bool = False


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """How waiting ended: the deployment is ready on at least one node, or `sentence` says why it is not.

    `in_force`: it is still what the orchestrator wants. `earlier`: an earlier version still serves.
    """

    ready: bool
    sentence: str
    in_force: bool = True
    earlier: bool = False


class Rollout:
    """Follows one deployment. Call `see` with each look, then read `ending`."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._look = Assignments({}, {})
        self._sightings: dict[str, _Sighting] = {}
        self._failures: list[str] = []
        self._steady: tuple[object, float] = (None, 0.0)
        self._now = 0.0

    def see(self, look: Assignments, now: float) -> list[tuple[str, Phase]]:
        """Takes a look; returns which nodes are in a new phase. `now` is in seconds, monotonic."""
        self._look, self._now = look, now
        view = look.deployments.get(self.deployment.model)
        assigned = () if view is None or view.deployment != self.deployment else view.assigned
        gone = [node_id for node_id in self._sightings if node_id not in assigned]
        changes = [self._drop(node_id) for node_id in gone]
        members = [look.nodes[node_id] for node_id in assigned if node_id in look.nodes]
        changes += [(node.node_id, self._phase(node.node_id)) for node in members if self._note(node)]
        self._failures += [node_id for node_id, phase in changes if phase is Phase.FAILED]
        self._keep_time()
        return changes

    def ending(self, reasons: Mapping[str, str], *, last: bool = False) -> RolloutEnd | None:
        """Returns how it ended, or None while it is worth waiting.

        `reasons`: why nodes failed. `last`: there is no time to see whether it stays so.
        """
        ended = self._ended_by_others() or self._ended_by_nodes(reasons, last)
        ready = self._in(Phase.READY)
        if ended is not None or len(ready) < len(self._sightings) or (self._is_short() and not self._is_at_rest(last)):
            return ended
        model = self.deployment.model
        if not ready:
            return RolloutEnd(False, f"{model!r} is deployed, but no node serves it: {self.count()}")
        return RolloutEnd(True, f"{model!r} is ready on {self.count()}: {names(ready)}")

    def _ended_by_others(self) -> RolloutEnd | None:
        """Returns the end of a deployment that somebody removed or replaced."""
        model = self.deployment.model
        view = self._look.deployments.get(model)
        if view is None:
            return RolloutEnd(False, f"{model!r} was removed meanwhile", in_force=False)
        if view.deployment != self.deployment:
            return RolloutEnd(False, f"{model!r} was deployed anew meanwhile, from {view.deployment.path}", in_force=False)
        return None

    def _ended_by_nodes(self, reasons: Mapping[str, str], last: bool) -> RolloutEnd | None:
        """Returns the end of a deployment that nodes refused, and that goes no further."""
        ready, refused, failed = map(self._in, (Phase.READY, Phase.REFUSED, Phase.FAILED))
        goes_round = not ready and len(self._failures) >= max(1, min(_MAX_FAILURES, len(self._look.nodes)))
        if not goes_round and not ((refused or failed or self._halted()) and self._is_at_rest(last)):
            return None
        if refused or self._failures:
            node_id, phase = (refused[0], Phase.REFUSED) if refused else (self._failures[-1], Phase.FAILED)
            why = f"{node_id} {phase.value}: {reasons.get(node_id) or _SILENT}"
        else:
            why = f"halted: {self._halted()}"
        earlier = bool(refused or self._in(Phase.EARLIER))
        return RolloutEnd(False, f"{self.deployment.model!r} is not ready: {self.count()}; {why}", earlier=earlier)

    def count(self) -> str:
        """Returns how many nodes are ready, and why there are not more to choose."""
        ready, wanted = len(self._in(Phase.READY)), self._wanted()
        nodes = "1 node" if wanted == 1 else f"{wanted} nodes"
        return f"{ready} of {nodes}" + (f", no free node ({self._taken()})" if self._is_short() else "")

    def reason(self, node_id: str) -> str:
        """Returns why a node failed or refused, from its report; empty if that is not known."""
        node = self._look.nodes.get(node_id)
        return (reason_in(node, self.deployment) if node else "") or self._shortage_reason(node_id)

    def waiting_for(self) -> str:
        """Returns what the nodes do that are not ready."""
        left = [node_id for node_id in self._sightings if self._phase(node_id) is not Phase.READY]
        return ", ".join(f"{node_id} {self._phase(node_id).value}" for node_id in left[:3]) or "no node is assigned"

    def displaced(self, before: Mapping[str, Node]) -> list[str]:
        """Returns the models that were ready `before` on nodes, and that no node keeps.

        An older node gives up its model when it is assigned. Another node gives up what does not fit
        beside the deployment: its report then lacks that model.
        """
        had = {model for node in before.values() for model in ready_models(node)}
        kept = {model for node in self._look.nodes.values() for model in self._keeps(node)}
        away = {model for node in before.values() if node.node_id not in self._look.nodes for model in ready_models(node)}
        return sorted(had - kept - away - {self.deployment.model, ""})

    def _keeps(self, node: Node) -> set[str]:
        """Returns the models that a node goes on to serve, also those that restart."""
        if not node.plural:
            return set() if node.node_id in self._sightings else {node.model}
        return {each.model for each in node.models}

    def _drop(self, node_id: str) -> tuple[str, Phase]:
        """Forgets a node that is no longer assigned. One that fails is replaced at once, if another is free."""
        seen, node = self._sightings.pop(node_id), self._look.nodes.get(node_id)
        if node is None:
            return node_id, Phase.GONE
        failed = phase_of(node, self.deployment) is Phase.FAILED and seen.phase is not Phase.FAILED
        return node_id, Phase.FAILED if failed else Phase.LEFT

    def _note(self, node: Node) -> bool:
        """Counts a beat; returns whether the node's phase is new."""
        seen = self._sightings.get(node.node_id)
        if seen is None:
            seen = self._sightings[node.node_id] = _Sighting(node, beats=0)
        elif reported(node, self.deployment.model) != reported(seen.node, self.deployment.model):
            seen.node, seen.beats, seen.changed = node, 1, True
        elif node.beat_time != seen.node.beat_time:
            seen.node, seen.beats = node, seen.beats + 1
        before, seen.phase = seen.phase, self._phase_of(seen)
        return seen.phase is not before

    def _phase_of(self, seen: _Sighting) -> Phase:
        phase = phase_of(seen.node, self.deployment)
        if phase is Phase.EARLIER:  # also before the node can know of the deployment
            return Phase.REFUSED if self._is_refused(seen) else phase
        # A node stops reporting a refusal when the orchestrator has heard of it.
        needed = _BEATS if is_final(phase) and not (phase is Phase.REFUSED and seen.changed) else 1
        if seen.beats < needed or phase is Phase.ASSIGNED:
            return seen.phase or Phase.ASSIGNED
        return phase

    def _is_refused(self, seen: _Sighting) -> bool:
        """Returns whether a node with the earlier version has refused this one."""
        return seen.phase is Phase.REFUSED or bool(self._shortage_reason(seen.node.node_id))

    def _shortage_reason(self, node_id: str) -> str:
        """Returns the orchestrator's reason why a node cannot take the deployment; empty if it gives none."""
        view = self._look.deployments.get(self.deployment.model)
        given = () if view is None else view.shortages
        return next((each.reason for each in given if each.node_id == node_id), "")

    def _phase(self, node_id: str) -> Phase:
        return self._sightings[node_id].phase or Phase.ASSIGNED

    def _in(self, phase: Phase) -> list[str]:
        return [node_id for node_id in self._sightings if self._phase(node_id) is phase]

    def _keep_time(self) -> None:
        """Notes since when nothing changes."""
        visible = {node_id: seen.phase for node_id, seen in self._sightings.items()}
        if self._steady[0] != visible:
            self._steady = (visible, self._now)

    def _is_at_rest(self, last: bool) -> bool:
        """Returns whether nothing will change by itself. `last`: does not wait to be sure.

        A cluster without nodes is starting. When a change is halted, the other nodes keep the earlier version. Some failures
        may be tolerated: then there is only a pause between two waves. Older orchestrators do not say what is halted.
        """
        stopped = self._halted() or self._in(Phase.REFUSED) or self._in(Phase.FAILED)
        resting = [is_final(seen.phase) or (stopped and seen.phase is Phase.EARLIER) for seen in self._sightings.values()]
        still = bool(self._look.nodes) and all(resting)
        waves = not self._halted() and self._in(Phase.EARLIER) and self._in(Phase.READY)
        return still and (last or self._now - self._steady[1] >= (_WAVES_S if waves else STEADY_S))

    def _halted(self) -> str:
        """Returns why the change is halted; empty if it is not known to be."""
        view = self._look.deployments.get(self.deployment.model)
        return view.waits_for if view is not None and view.halted else ""

    def _wanted(self) -> int:
        everywhere = len(self._look.nodes)
        return self.deployment.replicas or min(self.deployment.max_replicas or everywhere, everywhere)

    def _is_short(self) -> bool:
        return len(self._sightings) < max(1, self._wanted())

    def _taken(self) -> str:
        """Returns why the nodes that are not assigned here do not take it."""
        return why_not_more(self._look, self.deployment.model, self._sightings)
