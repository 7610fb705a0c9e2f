"""Chooses nodes so that few replicas of a model are lost with one zone or one host. Pure."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ryzanstein.cluster import Node


class SpreadOption(NamedTuple):
    """A node that may take a replica. `tier` counts before zones and hosts, `rank` after them; the smallest of each is best."""

    tier: tuple[bool, ...]
    rank: tuple[float, bytes]
    node: Node


def spread(options: Iterable[SpreadOption], count: int, present: Iterable[Node]) -> list[Node]:
    """Returns at most `count` nodes, the best first. `present` are those that have the model.

    Each is of the best tier that is left, in a zone with the fewest replicas, there on a host with the fewest, and of those
    the one of the best rank. Takes O(n log n), not a search for each.
    """
    zones, hosts = Counter[str](), Counter[tuple[str, str]]()
    for node in present:
        zones[node.zone] += 1
        hosts[node.zone, node.machine] += 1
    tiers: dict[tuple[bool, ...], list[SpreadOption]] = defaultdict(list)
    for option in options:
        tiers[option.tier].append(option)
    found: list[Node] = []
    for tier in sorted(tiers):
        if count > len(found):
            found += _of_tier(tiers[tier], count - len(found), zones, hosts)
    return found


def _of_tier(
    options: Sequence[SpreadOption], count: int, zones: Counter[str], hosts: Counter[tuple[str, str]]
) -> Iterator[Node]:
    """Yields nodes and counts them. A choice changes the place of its own zone and host alone, so both are kept in heaps."""
    left: dict[tuple[str, str], list[SpreadOption]] = defaultdict(list)
    for option in options:
        left[option.node.zone, option.node.machine].append(option)
    best: dict[str, list[tuple[int, tuple[float, bytes], str]]] = defaultdict(list)
    for (zone, host), those in left.items():
        if len(those) > 1:
            those.sort(key=lambda option: option.rank, reverse=True)
        best[zone].append((hosts[zone, host], those[-1].rank, host))
    for each in best.values():
        heapq.heapify(each)
    order = [(zones[zone], each[0], zone) for zone, each in best.items()]
    heapq.heapify(order)
    while order and count:
        _, _, zone = heapq.heappop(order)
        _, _, host = heapq.heappop(best[zone])
        those = left[zone, host]
        yield those.pop().node
        count -= 1
        zones[zone] += 1
        hosts[zone, host] += 1
        if those:
            heapq.heappush(best[zone], (hosts[zone, host], those[-1].rank, host))
        if best[zone]:
            heapq.heappush(order, (zones[zone], best[zone][0], zone))
