"""How far a deployment is, from what the orchestrator reports again and again. It makes no calls.

A node learns its deployment from the answer to a beat, and its next beat shows what it made of it.
A node may be READY or FAILED from before, even under the same name. So these two count only when
two beats in a row, since the node was assigned, report them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ryzanstein.cli.deployments import Assignments, names
from ryzanstein.cluster import Deployment, Node, NodeState

STEADY_S = 2.0  # longer than a node takes to appear, or to be assigned in another's place
_BEATS = 2
_MAX_FAILURES = 3  # the orchestrator tries other nodes, again and again


class Phase(Enum):
    """What an assigned node does. The values are for people."""

    ASSIGNED = "is assigned"
    FINISHING = "finishes its work first"
    LOADING = "loads"
    READY = "is ready"
    FAILED = "failed"
    LEFT = "is no longer assigned"
    GONE = "is no member now"


_BY_STATE = {
    NodeState.STARTING: Phase.LOADING,
    NodeState.RECOVERING: Phase.LOADING,
    NodeState.DRAINING: Phase.FINISHING,
    NodeState.FAILED: Phase.FAILED,
}


@dataclass(slots=True)
class _Sighting:
    """The beats of an assigned node that report the same: how many, and when the last one came."""

    node: Node
    beats: int
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How waiting ended: the deployment is ready on at least one node, or `sentence` says why it is not.

    `in_force`: it is still what the orchestrator wants.
    """

    ready: bool
    sentence: str
    in_force: bool = True


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

    def ending(self, reasons: Mapping[str, str], *, last: bool = False) -> Ending | None:
        """Returns how it ended, or None while it is worth waiting.

        `reasons`: why nodes failed. `last`: there is no time to see whether it stays so.
        """
        model = self.deployment.model
        view = self._look.deployments.get(model)
        if view is None:
            return Ending(False, f"{model!r} was removed meanwhile", in_force=False)
        if view.deployment != self.deployment:
            return Ending(False, f"{model!r} was deployed anew meanwhile, from {view.deployment.path}", in_force=False)
        ready, failed = self._in(Phase.READY), self._in(Phase.FAILED)
        goes_round = not ready and len(self._failures) >= max(1, min(_MAX_FAILURES, len(self._look.nodes)))
        if goes_round or (failed and self._is_at_rest(last)):
            why = f"{self._failures[-1]} failed: {reasons.get(self._failures[-1], 'it does not say why')}"
            return Ending(False, f"{model!r} is not ready: {self.count()}; {why}")
        if len(ready) < len(self._sightings) or (self._is_short() and not self._is_at_rest(last)):
            return None
        if not ready:
            return Ending(False, f"{model!r} is deployed, but no node serves it: {self.count()}")
        return Ending(True, f"{model!r} is ready on {self.count()}: {names(ready)}")

    def count(self) -> str:
        """Returns how many nodes are ready, and why there are not more to choose."""
        ready, wanted = len(self._in(Phase.READY)), self._wanted()
        nodes = "1 node" if wanted == 1 else f"{wanted} nodes"
        return f"{ready} of {nodes}" + (f", no free node{self._taken()}" if self._is_short() else "")

    def waiting_for(self) -> str:
        """Returns what the nodes do that are not ready."""
        left = [node_id for node_id in self._sightings if self._phase(node_id) is not Phase.READY]
        return ", ".join(f"{node_id} {self._phase(node_id).value}" for node_id in left[:3]) or "no node is assigned"

    def displaced(self, before: Mapping[str, Node]) -> list[str]:
        """Returns the models that were ready `before` only on nodes that are now assigned."""
        ready = [node for node in before.values() if node.state is NodeState.READY and not node.drain_requested]
        staying = {node.model for node in ready if node.node_id not in self._sightings}
        return sorted({node.model for node in ready} - staying - {self.deployment.model, ""})

    def _drop(self, node_id: str) -> tuple[str, Phase]:
        """Forgets a node that is no longer assigned. One that fails is replaced at once, if another is free."""
        seen, node = self._sightings.pop(node_id), self._look.nodes.get(node_id)
        if node is None:
            return node_id, Phase.GONE
        failed = node.state is NodeState.FAILED and seen.phase is not Phase.FAILED
        return node_id, Phase.FAILED if failed else Phase.LEFT

    def _note(self, node: Node) -> bool:
        """Counts a beat; returns whether the node's phase is new."""
        seen = self._sightings.get(node.node_id)
        if seen is None:
            seen = self._sightings[node.node_id] = _Sighting(node, beats=0)
        elif (node.state, node.model) != (seen.node.state, seen.node.model):
            seen.node, seen.beats = node, 1
        elif node.beat_time != seen.node.beat_time:
            seen.node, seen.beats = node, seen.beats + 1
        before, seen.phase = seen.phase, self._phase_of(seen)
        return seen.phase is not before

    def _phase_of(self, seen: _Sighting) -> Phase:
        ready = seen.node.state is NodeState.READY and seen.node.model == self.deployment.model
        phase = Phase.READY if ready else _BY_STATE.get(seen.node.state, Phase.ASSIGNED)
        needed = _BEATS if phase in (Phase.READY, Phase.FAILED) else 1
        if seen.beats < needed or phase is Phase.ASSIGNED:
            return seen.phase or Phase.ASSIGNED
        return phase

    def _phase(self, node_id: str) -> Phase:
        return self._sightings[node_id].phase or Phase.ASSIGNED

    def _in(self, phase: Phase) -> list[str]:
        return [node_id for node_id in self._sightings if self._phase(node_id) is phase]

    def _keep_time(self) -> None:
        """Notes since when nothing changes."""
        shown = {node_id: seen.phase for node_id, seen in self._sightings.items()}
        if self._steady[0] != shown:
            self._steady = (shown, self._now)

    def _is_at_rest(self, last: bool) -> bool:
        """Returns whether nothing will change by itself. `last`: does not wait to be sure.

        A cluster without nodes is starting.
        """
        still = bool(self._look.nodes) and all(seen.phase in (Phase.READY, Phase.FAILED) for seen in self._sightings.values())
        return still and (last or self._now - self._steady[1] >= STEADY_S)

    def _wanted(self) -> int:
        return self.deployment.replicas or len(self._look.nodes)

    def _is_short(self) -> bool:
        return len(self._sightings) < max(1, self._wanted())

    def _taken(self) -> str:
        """Returns who has the nodes that are not assigned here."""
        others = {
            node_id
            for view in self._look.deployments.values()
            if view.deployment.model != self.deployment.model
            for node_id in view.assigned
        }
        drained = [node for node in self._look.nodes.values() if node.drain_requested]
        counts = ((len(drained), "drained"), (len(others), "assigned to other models"))
        told = [f"the cluster has {len(self._look.nodes)}", *(f"{count} {what}" for count, what in counts if count)]
        return f" ({', '.join(told)})"
