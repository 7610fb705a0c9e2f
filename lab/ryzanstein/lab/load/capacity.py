"""How many requests a second a local cluster serves, so that a load can be a share of that."""

from __future__ import annotations

from ryzanstein.addresses import split_address
from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.lab.clients.transport import RouterAddress
from ryzanstein.lab.load.run import LoadBounds, LoadRun
from ryzanstein.lab.load.workload import Shape, conversations

NUM_PROMPTS = 32
_CAPACITY_S, _WARMUP_S = 20.0, 5.0


async def capacity(routers: list[RouterAddress], shape: Shape, seed: int) -> float:
    """Returns the requests a second of a closed loop that keeps every node busy."""
    run = LoadRun(routers, LoadBounds(_CAPACITY_S), seed)
    await run.closed(conversations(shape, NUM_PROMPTS, seed), 16)
    ended = sum(_WARMUP_S <= each.ended - run.started < _CAPACITY_S for each in run.outcomes if each.complete)
    return max(0.1, ended / (_CAPACITY_S - _WARMUP_S))


def routers_of(cluster: LocalCluster) -> list[RouterAddress]:
    """Returns the routers of a cluster, as clients reach them."""
    found = []
    for name in cluster.router_names:
        host, port = split_address(cluster.http_url_of(name).partition("://")[2])
        found.append(RouterAddress(cluster.services[name].grpc_address, host, port))
    return found
