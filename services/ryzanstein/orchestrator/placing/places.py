"""Which nodes may be changing a model: what each was told last, and what it has reported since. Plain logic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from ryzanstein.cluster import Deployment, Node
from ryzanstein.orchestrator.placing.waves import serves

# The answer to the first report says that a node was told otherwise, so the one after that shows that it came.
_BEATS_TO_SHOW = 2
# A node that vanished while it changed may be cut off from the orchestrator alone, and change on.
_GONE_S = 60.0


@dataclass(slots=True)
class _Place:
    """The place of one node. `told`: the revision that it was told to change to, or was seen to."""

    told: int
    beside: bool = False
    """Whether it loads that beside the earlier one, as far as was known when it was told."""
    beats: set[float] = field(default_factory=set)
    """The times of its last report before it was told otherwise, and of those since."""
    gone_since: float | None = None
    """When it was first seen not to be there."""

    def has_heard(self, node: Node) -> bool:
        """Whether the node has heard by now that it was told otherwise."""
        if len(self.beats) <= _BEATS_TO_SHOW:  # more tell nothing new, and a change may last for days
            self.beats.add(node.beat_time)
        return len(self.beats) > _BEATS_TO_SHOW

    def is_over(self, now: float) -> bool:
        """Whether a node that is not there has been away for so long that it changes nothing any more."""
        self.gone_since = now if self.gone_since is None else self.gone_since
        return now - self.gone_since >= _GONE_S


class WavePlaces:
    """The places in the wave of one model. A node keeps its own until it has changed, or must have heard that it should not."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    @property
    def node_ids(self) -> Set[str]:
        """The nodes that have a place."""
        return self._places.keys()

    def told(self, revision: int) -> set[str]:
        """Returns the nodes that were told to change to a revision, or do."""
        return {node_id for node_id, place in self._places.items() if place.told == revision}

    def is_told(self, node_id: str, revision: int) -> bool:
        """Whether a node was told to change to a revision, or does."""
        place = self._places.get(node_id)
        return place is not None and place.told == revision

    def loads_beside(self, node_id: str) -> bool:
        """Whether a node was told to change where both revisions fit."""
        place = self._places.get(node_id)
        return place is not None and place.beside

    def tell(self, node_id: str, revision: int, *, beside: bool) -> None:
        """Records that a node was told to change to a revision."""
        self._places[node_id] = _Place(revision, beside)

    def leave(self, node_id: str) -> None:
        """Notes that a node has left by itself, so that it changes no more."""
        self._places.pop(node_id, None)

    def look(
        self,
        deployment: Deployment,
        members: Sequence[Node],
        nodes: Mapping[str, Node],
        *,
        waiting: Collection[str],
        shows: Callable[[Node], int | None],
        now: float,
    ) -> None:
        """Compares the places with what nodes report. `nodes` are all, `members` those that should have the deployment.

        `waiting`: members that do not have its revision. `shows`: the revision to which a member changes by its report, or has
        changed only just; None: it does not.
        """
        for node in members:
            self._look_at(node, deployment, shows(node), waits=node.node_id in waiting)
        for node_id in self._places.keys() - {node.node_id for node in members}:
            place, elsewhere = self._places[node_id], nodes.get(node_id)
            if place.is_over(now) if elsewhere is None else place.has_heard(elsewhere):
                del self._places[node_id]
            elif elsewhere is not None:
                place.gone_since = None

    def _look_at(self, node: Node, deployment: Deployment, shown: int | None, *, waits: bool) -> None:
        place = self._places.get(node.node_id)
        if place is None:
            if shown is not None:
                self._places[node.node_id] = _Place(shown)
            return
        place.gone_since = None
        if shown == deployment.revision:
            place.told = shown
        if place.told == deployment.revision:
            place.beats.clear()
            over = shown is None and not waits
        else:
            over = (place.has_heard(node) or _has(node, deployment.model, place.told)) and shown is None
        if over:
            del self._places[node.node_id]


def _has(node: Node, model: str, revision: int) -> bool:
    """Whether a node serves a revision."""
    report = node.report(model)
    return report is not None and report.revision == revision and serves(node, model)
