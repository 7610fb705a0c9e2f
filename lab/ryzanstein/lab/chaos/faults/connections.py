"""The network between router, node and orchestrator: reset, cut one or both ways, far away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ryzanstein.addresses import split_address
from ryzanstein.cli.processes.cluster import ORCHESTRATOR
from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.faults.nodes import FROZEN_S, LINK_DOWN, SUSPECTED
from ryzanstein.lab.chaos.stage.layouts import DISTANT
from ryzanstein.lab.chaos.stage.stage import Stage

_RESET_S = 0.2
_FAR_S = 0.5
# Streams that are almost done may end before the fault is noticed; during this time there are
# others.
_CUT_S = 1.5
# Longer than a lease of three seconds, so that the orchestrator gives the node up.
_NO_ORCHESTRATOR_S = 4.0


@asynccontextmanager
async def _reset(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Answers everything that the router sends to the node, acknowledgements too, with a reset."""
    router, port = stage.address_of(victim.router), split_address(stage.cluster.services[victim.node_id].grpc_address)[1]
    rule = f"ip saddr {router} tcp dport {port} reject with tcp reset"
    async with stage.network.rules(stage.host_of(victim.node_id), inbound=(rule,), now=stage.strikes_now):
        await asyncio.sleep(_RESET_S)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _one_way(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Cuts the direction from the router to the node or the opposite one, as the seed decides."""
    router = stage.address_of(victim.router)
    deaf = victim.rng.random() < 0.5
    inbound = (f"ip saddr {router} drop",) if deaf else ()
    outbound = () if deaf else (f"ip daddr {router} drop",)
    async with stage.network.rules(stage.host_of(victim.node_id), inbound, outbound, now=stage.strikes_now):
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _two_way(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    router = stage.address_of(victim.router)
    rules = (f"ip saddr {router} drop",), (f"ip daddr {router} drop",)
    async with stage.network.rules(stage.host_of(victim.node_id), *rules, now=stage.strikes_now):
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _from_orchestrator(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    orchestrator = stage.address_of(ORCHESTRATOR)
    rules = (f"ip saddr {orchestrator} drop",), (f"ip daddr {orchestrator} drop",)
    async with stage.network.rules(stage.host_of(victim.node_id), *rules, now=stage.strikes_now):
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _far_away(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    proxy = stage.plan.delayed[victim.node_id]
    proxy.delay(_FAR_S)
    try:
        yield frozenset({victim.node_id})
    finally:
        proxy.delay(0)


FAULTS = (
    Fault(
        "tcp_reset",
        "router-node connections reset for 0.2 s",
        _reset,
        (LINK_DOWN,),
        needs_network=True,
        bounds=FaultBounds(FROZEN_S),
    ),
    Fault(
        "partition_router_node_one_way",
        "one direction between router and node drops all packets",
        _one_way,
        (SUSPECTED, LINK_DOWN),
        bounds=FaultBounds(FROZEN_S),
        lasts_s=_CUT_S,
        needs_network=True,
    ),
    Fault(
        "partition_router_node_two_way",
        "both directions between router and node drop all packets",
        _two_way,
        (SUSPECTED, LINK_DOWN),
        bounds=FaultBounds(FROZEN_S),
        lasts_s=_CUT_S,
        needs_network=True,
    ),
    Fault(
        "partition_node_orchestrator",
        "both directions between a node and the orchestrator drop all packets for 4 s",
        _from_orchestrator,
        (Sign("orchestrator", "node removed"),),
        scope=Scope.NODE,
        resumes=Resume.ANY,
        lasts_s=_NO_ORCHESTRATOR_S,
        needs_network=True,
    ),
    Fault(
        "node_500ms_away",
        "traffic between router and a node is delayed by 0.5 s in each direction",
        _far_away,
        (SUSPECTED, LINK_DOWN),
        DISTANT,
        resumes=Resume.ANY,
        lasts_s=1.0,
    ),
)
