"""Replicas over zones and hosts: against a search that looks at every node for every replica."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.cluster import Deployment, ModelNeed, ModelReport, Node, NodeState
from ryzanstein.orchestrator.placing.placement import Placement, Reports, place
from ryzanstein.orchestrator.placing.spreading import SpreadOption, spread

READY = NodeState.READY
PLACES = st.tuples(st.sampled_from(["", "z1", "z2", "z3"]), st.sampled_from(["", "h1", "h2", "h3"]))


def node(number: int, zone: str = "", host: str = "", *models: ModelReport, room: int = 100) -> Node:
    return Node(f"n{number}", "h:1", "1", state=READY, models=models, memory_bytes=room, host=host, zone=zone)


def served(model: str, size: int = 10) -> ModelReport:
    return ModelReport(model, f"/{model}", state=READY, memory_bytes=size)


def measured(nodes: list[Node], *models: str) -> Reports:
    return Reports(needs={each.node_id: {f"/{model}": ModelNeed(f"/{model}", 10) for model in models} for each in nodes})


def zones_of(placement: Placement, nodes: list[Node], model: str = "m") -> Counter[str]:
    has = {node_id for node_id, those in placement.assigned.items() if any(d.model == model for d in those)}
    return Counter(each.zone for each in nodes if each.node_id in has)


@given(
    st.lists(st.tuples(PLACES, st.booleans(), st.integers(0, 3)), max_size=20),
    st.lists(PLACES, max_size=6),
    st.integers(0, 22),
)
def test_it_is_the_choice_of_one_after_the_other(
    given_options: list[tuple[tuple[str, str], bool, int]], there: list[tuple[str, str]], count: int
) -> None:
    options = [
        SpreadOption((worse,), (float(rank), str(number).encode()), node(number, *place_of))
        for number, (place_of, worse, rank) in enumerate(given_options)
    ]
    present = [node(100 + number, *place_of) for number, place_of in enumerate(there)]
    zones, hosts = Counter(each.zone for each in present), Counter((each.zone, each.machine) for each in present)
    expected, left = [], list(options)
    while left and len(expected) < count:
        best = min(
            left,
            key=lambda each: (each.tier, zones[each.node.zone], hosts[each.node.zone, each.node.machine], each.rank),
        )
        left.remove(best)
        expected.append(best.node)
        zones[best.node.zone] += 1
        hosts[best.node.zone, best.node.machine] += 1
    assert spread(options, count, present) == expected


@given(st.lists(PLACES, min_size=1, max_size=16), st.integers(1, 16), st.randoms())
def test_replicas_are_even_over_zones_and_hosts_as_far_as_there_are_nodes(
    places: list[tuple[str, str]], replicas: int, random: object
) -> None:
    nodes = [node(number, *place_of) for number, place_of in enumerate(places)]
    wanted = Deployment("m", "/m", replicas)
    placement = place([wanted], nodes, measured(nodes, "m"))
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place([wanted], shuffled, measured(nodes, "m")).assigned == placement.assigned
    chosen = [each for each in nodes if each.node_id in placement.assigned]
    assert len(chosen) == min(replicas, len(nodes))
    free = [each for each in nodes if each.node_id not in placement.assigned]
    zones, hosts = Counter(each.zone for each in chosen), Counter((each.zone, each.machine) for each in chosen)
    assert all(zones[zone] <= zones[other.zone] + 1 for zone in zones for other in free)
    for (zone, _), num in hosts.items():
        assert all(num <= hosts[zone, other.machine] + 1 for other in free if other.zone == zone)


def test_a_node_that_failed_or_whose_model_gives_way_is_worse_than_a_zone_with_more_replicas() -> None:
    nodes = [node(0, "z1", "h1", served("m")), node(1, "z1", "h1"), node(2, "z2", "h2")]
    reports = measured(nodes, "m")
    assert zones_of(place([Deployment("m", "/m", 2)], nodes, reports), nodes) == {"z1": 1, "z2": 1}
    failed = Reports({("n2", "m")}, reports.needs)
    assert zones_of(place([Deployment("m", "/m", 2)], nodes, failed), nodes) == {"z1": 2}
    started = ModelReport("own", "/own", state=READY, memory_bytes=95, started_with=True)
    full = [*nodes[:2], node(2, "z2", "h2", started)]
    assert zones_of(place([Deployment("m", "/m", 2)], full, reports), full) == {"z1": 2}


def test_a_zone_counts_before_the_memory_that_is_left() -> None:
    nodes = [node(0, "z1", "h1", served("m")), node(1, "z1", "h2", room=1000), node(2, "z2", "h3", room=20)]
    assert zones_of(place([Deployment("m", "/m", 2)], nodes, measured(nodes, "m")), nodes) == {"z1": 1, "z2": 1}


def test_replicas_stay_where_they_are_and_fewer_of_them_stay_apart() -> None:
    crowded = [node(number, "z1", f"h{number}", served("m")) for number in range(3)]
    nodes = [*crowded, node(3, "z2", "h3"), node(4, "z2", "h4")]
    assert zones_of(place([Deployment("m", "/m", 3)], nodes, measured(nodes, "m")), nodes) == {"z1": 3}
    both = [*crowded, node(3, "z2", "h3", served("m"))]
    assert zones_of(place([Deployment("m", "/m", 2)], both, measured(both, "m")), both) == {"z1": 1, "z2": 1}


def test_nodes_of_an_earlier_release_are_hosts_of_their_own_in_no_zone() -> None:
    nodes = [node(0, "", "", served("m")), node(1, "", ""), node(2, "", "h1", served("m")), node(3, "", "h1")]
    placement = place([Deployment("m", "/m", 3)], nodes, measured(nodes, "m"))
    assert set(placement.assigned) == {"n0", "n1", "n2"}
