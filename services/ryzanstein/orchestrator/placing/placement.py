"""Decides which node serves which deployments: a pure function of desired state and node reports.

A node takes any number of deployments that fit into its memory; an older node takes one. The rules
apply in this order:

1. A node that serves a deployment, or was last assigned to it, keeps it. An older node keeps only
   deployments that state a number of replicas.
2. Deployments that lack replicas are placed, the largest first: on nodes that have not failed them,
   where no other model gives way, in the zone and then on the host with the fewest replicas, with the
   most memory left; then by rendezvous hash (Thaler and Ravishankar, 1998).
3. Deployments that want every node are added to every node that they fit on. Older nodes that are
   left over are shared among them.

A new deployment therefore never takes the place of one that is assigned; it stays short instead.
Replicas do not move to where fewer are: that would cost loads. Those of a smaller number stay apart.
The result does not depend on the order of the nodes, and changes little when one comes or goes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ryzanstein.cluster import Deployment, ModelNeed, Node
from ryzanstein.orchestrator.placing.packing import NodeRoom, NodeShortage
from ryzanstein.orchestrator.placing.spreading import SpreadOption, spread

Failed = Collection[tuple[str, str]]
"""Node ids and models: which nodes lately failed to serve which model, see `refusals`."""
NodeNeeds = Mapping[str, Mapping[str, ModelNeed]]
"""By node id and directory: the memory that models need, as nodes measured it."""
Assigned = Mapping[str, tuple[Deployment, ...]]
"""By node id: the deployments that nodes should serve. Nodes that have none are absent."""

MAX_SHORTAGES = 64
STEP = 4096
"""So many looks at a node for a model are one step of a placement: 5 to 10 ms."""

_BEST_TIER = (False, False, False)


@dataclass(frozen=True, slots=True)
class Reports:
    """What nodes reported beside their state, and `before`: what was assigned to them last.

    `surges`: how many nodes more than it states a model may have, where that displaces nobody.
    """

    failed: Failed = ()
    needs: NodeNeeds = field(default_factory=dict)
    before: Assigned = field(default_factory=dict)
    surges: Mapping[str, int] = field(default_factory=dict)


class Placement:
    """Which node serves what, and why deployments lack nodes."""

    def __init__(self, rooms: Mapping[str, NodeRoom] | None = None) -> None:
        self._rooms = rooms or {}
        self.assigned: Assigned = {
            node_id: tuple(room.placed[model] for model in sorted(room.placed))
            for node_id, room in self._rooms.items()
            if room.placed
        }
        self._num_usable = sum(not room.node.drain_requested for room in self._rooms.values())
        self._placed = Counter(d.model for deployments in self.assigned.values() for d in deployments)

    def has(self, node_id: str) -> bool:
        """Returns whether a node was there when this was decided."""
        return node_id in self._rooms

    def short(self, deployment: Deployment) -> int:
        """Returns how many more nodes the deployment should have."""
        usable = self._num_usable
        wanted = deployment.replicas or min(deployment.max_replicas or usable, usable)
        return max(0, wanted - self._placed[deployment.model])

    def count(self, model: str) -> int:
        """Returns on how many nodes a model is placed."""
        return self._placed[model]

    def shortages(self, deployment: Deployment) -> list[NodeShortage]:
        """Returns why nodes cannot take a deployment that lacks some; at most MAX_SHORTAGES."""
        found: list[NodeShortage] = []
        if not self.short(deployment):
            return found
        for node_id in sorted(self._rooms):
            room = self._rooms[node_id]
            if deployment.model not in room.placed and (shortage := room.shortage(deployment)) is not None:
                found.append(shortage)
                if len(found) == MAX_SHORTAGES:
                    break
        return found

    def without_room_for(self, deployment: Deployment, needs: NodeNeeds) -> list[NodeShortage]:
        """Returns why no node could take a deployment if its directory were loaded now.

        Empty if a node could, or may: it is older, or has not measured the directory.
        """
        found: list[NodeShortage] = []
        for node_id in sorted(self._rooms):
            room = self._rooms[node_id]
            if room.node.drain_requested:
                continue
            if not room.node.plural or deployment.path not in needs.get(node_id, {}):
                return []
            alone = _without(room, deployment.model, needs[node_id]).shortage(deployment)
            if alone is None:
                return []
            found.append(alone)
        return found


def place(deployments: Sequence[Deployment], nodes: Iterable[Node], reports: Reports | None = None) -> Placement:
    """Assigns deployments to nodes. Nodes that should drain get none."""
    return next(filter(None, place_in_steps(deployments, nodes, reports)))


def place_in_steps(
    deployments: Sequence[Deployment], nodes: Iterable[Node], reports: Reports | None = None
) -> Iterator[Placement | None]:
    """Does what `place` does in steps of a few milliseconds: yields None after each, and at last the placement.

    What it is given may not change meanwhile.
    """
    reports, pace = reports or Reports(), _Pace()
    ordered = sorted(nodes, key=lambda node: node.node_id)
    rooms = {node.node_id: NodeRoom(node, reports.needs.get(node.node_id, {})) for node in ordered}
    usable = [room for room in rooms.values() if not room.node.drain_requested]
    by_name = sorted(deployments, key=lambda d: d.model)
    counts = _keep(by_name, usable, reports)
    yield None
    lacking = [d for d in by_name if d.limit > counts[d.model]]
    table = array("q")  # node by node, since what a node measured lies together in memory
    for room in usable if lacking else ():
        table.extend(room.sizes(lacking))
        if pace.is_over(len(lacking)):
            yield None
    sizes = {d.model: table[number :: len(lacking)] for number, d in enumerate(lacking)}
    serving_counted = {d.model for d in by_name if d.limit}
    for deployment in sorted(lacking, key=lambda d: (-max(0, max(sizes[d.model], default=0)), d.model)):
        missing = deployment.limit - counts[deployment.model]
        _take(deployment, missing, usable, sizes[deployment.model], reports.failed, counted=serving_counted)
        if pace.is_over(len(usable)):
            yield None
    for deployment in (d for d in by_name if d.limit and reports.surges.get(d.model)):
        missing = deployment.limit + reports.surges[deployment.model] - sum(deployment.model in room.placed for room in usable)
        sizes_now = [size for room in usable for size in room.sizes([deployment])]
        _take(deployment, missing, usable, sizes_now, reports.failed, counted=serving_counted, surge=True)
        if pace.is_over(len(usable)):
            yield None
    everywhere = [d for d in by_name if not d.limit]
    for room in usable if everywhere else ():
        _spread(everywhere, room)
        if pace.is_over(len(everywhere)):
            yield None
    yield Placement(rooms)


class _Pace:
    """Counts how often a node was looked at for a model since the last step began."""

    def __init__(self) -> None:
        self._num_looks = 0

    def is_over(self, num_looks: int) -> bool:
        """Whether the step has lasted long enough after so many looks more."""
        self._num_looks += num_looks
        if self._num_looks < STEP:
            return False
        self._num_looks = 0
        return True


def _keep(deployments: Sequence[Deployment], rooms: Sequence[NodeRoom], reports: Reports) -> Counter[str]:
    """Leaves deployments where they are, at most as often as each wants; returns how often.

    First come those that are assigned and served, then those that are assigned and not there yet,
    then those that are only served.
    """
    counts: Counter[str] = Counter()
    before = {node_id: {d.model for d in assigned} for node_id, assigned in reports.before.items()}
    homes = _homes(deployments, rooms, before, reports.failed)

    def where(*, assigned: bool, served: bool) -> list[list[NodeRoom]]:
        found = homes[assigned, served]
        return [found.get(d.model, []) for d in deployments]

    def awaited(deployment: Deployment, room: NodeRoom) -> bool:
        has_failed = room.fails(deployment) or (room.node.node_id, deployment.model) in reports.failed
        return room.node.plural and not has_failed

    _keep_where(deployments, where(assigned=True, served=True), counts, rooms, reports.surges)
    if before:
        found = zip(deployments, where(assigned=True, served=False), strict=True)
        absent = [[room for room in rooms_of if awaited(d, room)] for d, rooms_of in found]
        _keep_where(deployments, absent, counts, rooms, reports.surges, fitting=True)
    _keep_where(deployments, where(assigned=False, served=True), counts, rooms, reports.surges, fitting=bool(before))
    return counts


def _homes(
    deployments: Sequence[Deployment], rooms: Sequence[NodeRoom], before: Mapping[str, Collection[str]], failed: Failed
) -> dict[tuple[bool, bool], dict[str, list[NodeRoom]]]:
    """Returns the rooms of each model by whether it is assigned to the node, and whether the node serves it: one or both.

    A node that failed a revision, and tries it again or comes no further, does not serve it.
    """
    wanted = {d.model: d for d in deployments}
    homes: dict[tuple[bool, bool], dict[str, list[NodeRoom]]] = {(True, True): {}, (True, False): {}, (False, True): {}}
    for room in rooms:
        assigned, served = before.get(room.node.node_id, frozenset()), room.served
        for model in {*assigned, *served} & wanted.keys():
            serves = model in served and not ((room.node.node_id, model) in failed and room.starts(wanted[model]))
            if serves or model in assigned:
                homes[model in assigned, serves].setdefault(model, []).append(room)
    return homes


def _keep_where(
    deployments: Sequence[Deployment],
    where: Sequence[list[NodeRoom]],
    counts: Counter[str],
    everywhere: Sequence[NodeRoom],
    surges: Mapping[str, int],
    *,
    fitting: bool = False,
) -> None:
    """Puts deployments on their nodes. `fitting`: only where they fit, as an older node's always must."""
    for deployment, rooms in zip(deployments, where, strict=True):
        most = deployment.limit + surges.get(deployment.model, 0)
        wanted = most - counts[deployment.model] if deployment.limit else len(rooms)
        for room in _first(rooms, wanted, deployment, everywhere):
            if room.node.plural and (not fitting or room.fits(deployment)):
                keeps = True
            else:
                keeps = bool(deployment.limit) and room.fits(deployment)
            if keeps:
                room.put(deployment)
                counts[deployment.model] += 1


def _first(rooms: list[NodeRoom], limit: int, deployment: Deployment, everywhere: Sequence[NodeRoom]) -> list[NodeRoom]:
    """Returns at most `limit` rooms, the same ones whatever their order.

    First come those that are ready, of these the ones with this revision; then those in different zones and on different hosts.
    """
    if len(rooms) <= limit:
        return rooms
    model = deployment.model
    options = (SpreadOption(room.lacks(deployment), (0.0, room.weight(model.encode())), room.node) for room in rooms)
    by_id = {room.node.node_id: room for room in rooms}
    return [by_id[node.node_id] for node in spread(options, max(0, limit), _present(model, everywhere))]


def _present(model: str, rooms: Iterable[NodeRoom]) -> Iterable[Node]:
    return (room.node for room in rooms if model in room.placed)


def _take(
    deployment: Deployment,
    missing: int,
    rooms: Sequence[NodeRoom],
    sizes: Iterable[int],
    failed: Failed,
    *,
    counted: Collection[str],
    surge: bool = False,
) -> None:
    """Puts a deployment on as many nodes as it lacks, if it fits on so many. `surge`: only on those of the best tier.

    `sizes`: what it takes in each room, as `NodeRoom.sizes` says it. `counted`: the models that state a number of nodes.
    Last come nodes that failed to serve it: first those that still have it, so that a model that
    fails everywhere stays where it failed last.
    """
    model, name = deployment.model, deployment.model.encode()
    candidates: dict[str, NodeRoom] = {}
    options: list[SpreadOption] = []
    for room, size in zip(rooms, sizes, strict=True):
        if model in room.placed or (fraction := room.fraction(deployment, size)) is None:
            continue
        node_id, has_failed = room.node.node_id, (room.node.node_id, model) in failed
        tier = _BEST_TIER if room.blank and not has_failed else _tier(deployment, room, has_failed, counted)
        if tier is _BEST_TIER or not surge or not any(tier):
            candidates[node_id] = room
            options.append(SpreadOption(tier, (fraction, room.weight(name)), room.node))
    for node in spread(options, missing, _present(model, rooms)):
        candidates[node.node_id].put(deployment)


def _tier(deployment: Deployment, room: NodeRoom, has_failed: bool, counted: Collection[str]) -> tuple[bool, ...]:
    node, fails = room.node, room.fails(deployment)
    has_failed = has_failed or (fails if node.plural else node.model == deployment.model)
    displaces = room.displaces(deployment) if node.plural else node.model in counted and node.model != deployment.model
    return has_failed, has_failed and not (fails or room.starts(deployment)), displaces


def _spread(everywhere: Sequence[Deployment], room: NodeRoom) -> None:
    """Adds the deployments that want every node to one.

    An older node takes one: what it serves, otherwise the hash decides.
    """
    for deployment in _largest_first(everywhere, room) if room.node.plural else _one_of(everywhere, room):
        if deployment.model not in room.placed and room.fits(deployment):
            room.put(deployment)


def _largest_first(everywhere: Sequence[Deployment], room: NodeRoom) -> list[Deployment]:
    return sorted(everywhere, key=lambda d: (-(room.memory(d) or 0), d.model))


def _one_of(everywhere: Sequence[Deployment], room: NodeRoom) -> list[Deployment]:
    served = [d for d in everywhere if d.model == room.node.model]
    return served or [min(everywhere, key=lambda d: room.weight(d.model.encode()))]


def _without(room: NodeRoom, model: str, needs: Mapping[str, ModelNeed]) -> NodeRoom:
    """Returns the room as it is when a model has gone, so that its directory counts as measured."""
    kept = tuple(report for report in room.node.models if report.model != model)
    other = NodeRoom(replace(room.node, models=kept), needs)
    for placed in room.placed.values():
        if placed.model != model:
            other.put(placed)
    return other
