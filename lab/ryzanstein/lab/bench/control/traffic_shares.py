"""Whose messages the stand-ins have counted: each is one of the orchestrator or of a router, too."""

from __future__ import annotations

from collections.abc import Iterable

from ryzanstein.lab.bench.control.cluster import ControlCluster
from ryzanstein.lab.bench.control.plan import ControlCell
from ryzanstein.lab.bench.control.standins.traffic import Traffic


def traffic_shares(cell: ControlCell, cluster: ControlCluster) -> dict[str, Traffic]:
    """Returns what each process sent and received so far.

    A real router's share is the mean of them, and its watch is counted as that of one stand-in for a router.
    """
    assert cluster.watchers is not None
    watching = cluster.watchers.traffic("to_orchestrator")
    one_watch = Traffic(*(count // cell.watchers for count in _counts(watching)))
    beating = _sum(each.traffic("to_orchestrator") for each in cluster.nodes)
    linking = _sum(each.traffic("to_routers") for each in cluster.nodes)
    one_router = _mirrored(Traffic(*(count // cell.real_routers for count in _counts(linking))))
    shares = {"orchestrator": _mirrored(_sum([beating, watching, *[one_watch] * cell.real_routers]))}
    shares |= {router.name: _sum([one_router, one_watch]) for router in cluster.routers}
    shares |= {each.name: _sum([each.traffic("to_orchestrator"), each.traffic("to_routers")]) for each in cluster.nodes}
    return shares | {cluster.watchers.name: watching}


def _counts(traffic: Traffic) -> tuple[int, ...]:
    return tuple(getattr(traffic, name) for name in Traffic.__dataclass_fields__)


def _sum(parts: Iterable[Traffic]) -> Traffic:
    return Traffic(*(sum(counts) for counts in zip(*map(_counts, parts), strict=True)))


def _mirrored(traffic: Traffic) -> Traffic:
    """Returns the traffic as the other side sees it."""
    return Traffic(traffic.received_messages, traffic.received_bytes, traffic.sent_messages, traffic.sent_bytes)
