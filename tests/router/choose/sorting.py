"""The choice as a filter and a full sort over frozen views of all nodes: what `Chooser` must do, however it does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from ryzanstein.cluster import NodeState
from ryzanstein.router.choose import Affinity, NodeView, PolicyBounds, PolicyName
from ryzanstein.router.choose.policies import PrefixIndex
from ryzanstein.router.choose.recent_load import RecentLoad
from ryzanstein.router.choose.rendezvous import scaled, tie_breaker, weight

Nodes = Sequence[NodeView]
KEYED = ("affinity", "bounded", "weighted", "prefix")


@dataclass(frozen=True)
class Sorted:
    """A ranking. `ranked`: every node that the policy ranked, whether or not it can take the request."""

    node_ids: list[str]
    ranked: list[str]
    able: frozenset[str]
    excluded: Collection[str]
    affinity: Affinity


class SortingChooser:
    """One policy, without the switch from affinity to bounded."""

    def __init__(self, policy: PolicyName, bounds: PolicyBounds, window_s: float, clock: Callable[[], float]) -> None:
        self.policy, self.bounds = policy, bounds
        self.placed, self.wanted = RecentLoad(window_s, clock), RecentLoad(window_s, clock)
        self.turn, self.index = 0, PrefixIndex(bounds.prefix_entries)

    def rank(self, nodes: Nodes, model: str, affinity: Affinity, excluded: Collection[str]) -> Sorted:
        regular, reserve = divided([node for node in nodes if node.model == model])
        usable = [node for node in regular if is_usable(node, model)]
        for load in (self.placed, self.wanted):
            load.see({node.node_id: node for node in regular}, frozenset(node.node_id for node in usable))
        ranked = self.order(affinity, regular if self.policy in KEYED else usable)
        behind = self.order(affinity, [node for node in reserve if is_usable(node, model)])
        able = {node.node_id for node in usable}
        takers = [node for node in ranked if node.node_id in able and node.node_id not in excluded]
        last = [node for node in behind if node.node_id not in excluded]
        ordered = [node.node_id for part in (takers, last) for node in self.picked(affinity, part)]
        return Sorted(ordered, [node.node_id for node in [*ranked, *behind]], frozenset(able), excluded, affinity)

    def place(self, ranking: Sorted, chosen: str) -> str:
        """Returns the outcome."""
        if self.policy == "prefix":
            self.index.put(ranking.affinity.marks, chosen)
        if self.policy == "round_robin":
            self.turn += 1
        if chosen in ranking.able:
            self.placed.placed(chosen)
            if not ranking.excluded:
                belongs = next(node_id for node_id in ranking.ranked if node_id in ranking.able)
                self.wanted.placed(belongs if self.policy in KEYED else chosen)
        return self.outcome(ranking, chosen)

    def outcome(self, ranking: Sorted, chosen: str) -> str:
        primary = ranking.ranked[0]
        if chosen not in ranking.able:
            return "reserve"
        if self.policy not in KEYED:
            return "balanced"
        if chosen == primary:
            return "primary"
        if self.policy == "bounded" and chosen == ranking.affinity.home:
            return "home"
        if primary in ranking.excluded:
            return "excluded"
        return "overflowed" if primary in ranking.able else "unusable"

    def order(self, affinity: Affinity, nodes: Nodes) -> list[NodeView]:
        key = affinity.key
        match self.policy:
            case "affinity" | "bounded":
                return sorted(nodes, key=lambda node: (weight(key, node.node_id), node.node_id), reverse=True)
            case "weighted":
                return sorted(
                    nodes,
                    key=lambda node: (scaled(weight(key, node.node_id), node.capacity), node.node_id),
                    reverse=True,
                )
            case "prefix":
                ranked = sorted(nodes, key=lambda node: (weight(key, node.node_id), node.node_id), reverse=True)
                depth = {node_id: depth for depth, node_id in enumerate(self.index.find(affinity.marks))}
                return sorted(ranked, key=lambda node: depth.get(node.node_id, len(depth)))
            case "least_loaded":
                return sorted(nodes, key=lambda node: (node.relative_load, -weight(key, node.node_id), node.node_id))
            case "round_robin":
                ordered = sorted(nodes, key=lambda node: node.node_id)
                first = self.turn % max(1, len(ordered))
                return ordered[first:] + ordered[:first]

    def picked(self, affinity: Affinity, ranked: Nodes) -> list[NodeView]:
        if self.policy == "bounded":
            ranked = sorted(ranked, key=lambda node: node.node_id != affinity.home)
        is_full = self.limit(affinity, ranked)
        free = list(islice((node for node in ranked if not is_full(node)), 2))
        if not free:
            return sorted(ranked, key=lambda node: node.relative_load)
        chosen = {node.node_id for node in free}
        return free + [node for node in ranked if node.node_id not in chosen]

    def limit(self, affinity: Affinity, nodes: Nodes) -> Callable[[NodeView], bool]:
        queue_bound = 0 if self.policy == "prefix" else self.bounds.queue_bound
        queued, recent = self.queued(affinity, nodes, queue_bound), self.recently_full(affinity, nodes)
        match self.policy:
            case "affinity" | "weighted":
                return queued
            case "bounded" | "prefix":
                return lambda node: queued(node) or recent(node)
            case _:
                return lambda node: False

    def queued(self, affinity: Affinity, nodes: Nodes, queue_bound: int) -> Callable[[NodeView], bool]:
        if affinity.sticky:
            return lambda node: node.waiting > queue_bound
        total = 1 + sum(node.sequences for node in nodes)
        share = math.ceil(1.25 * total / max(1, len(nodes)))
        return lambda node: node.sequences >= share

    def recently_full(self, affinity: Affinity, nodes: Nodes) -> Callable[[NodeView], bool]:
        share = self.placed.share(nodes)
        loads = dict(zip((node.node_id for node in nodes), self.placed.values(nodes), strict=True))

        def is_full(node: NodeView) -> bool:
            load = loads[node.node_id]
            excess = load / (share * node.capacity) - 1.0 if load else -1.0
            at_home = affinity.home == node.node_id
            if load < self.bounds.bound_floor or excess < 0.0 or (at_home and not node.sequences):
                return False
            own = 1.0 if at_home else tie_breaker(weight(affinity.key, node.node_id))
            return excess >= (self.bounds.load_bound - 1.0) * own

        return is_full


def is_usable(node: NodeView, model: str) -> bool:
    if not node.linked or node.model != model or node.state is not NodeState.READY:
        return False
    return node.admits and not node.suspected and not node.drain_requested


def divided(nodes: Nodes) -> tuple[list[NodeView], list[NodeView]]:
    regular = [node for node in nodes if not node.reserve]
    return (regular, [node for node in nodes if node.reserve]) if regular else (list(nodes), [])
