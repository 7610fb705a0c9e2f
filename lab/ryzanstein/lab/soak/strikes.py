"""The faults of a soak. They strike one node and one router: the others live from its start to its end, and are measured."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.processes.cluster import ORCHESTRATOR, LocalCluster
from ryzanstein.lab.chaos.stage.signals import family, send, stopped
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

NODE, ROUTER = "node-0", "router-1"
"""What is struck."""
_STATUS_S = 10.0
_STOPPED_S, _DOWN_S = 5.0, 3.0


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault; returns when it is over and what ended was started again."""

    name: str
    what: str
    act: Callable[[LocalCluster], Awaitable[None]]


async def _kill_node(cluster: LocalCluster) -> None:
    for pid in family(cluster.services[NODE].pid):
        send(pid, signal.SIGKILL)
    await _again(cluster, NODE)


async def _stop_node(cluster: LocalCluster) -> None:
    async with stopped(family(cluster.services[NODE].pid)):
        await asyncio.sleep(_STOPPED_S)


async def _kill_rank(cluster: LocalCluster) -> None:
    send(await _rank(cluster), signal.SIGKILL)


async def _stop_rank(cluster: LocalCluster) -> None:
    async with stopped([await _rank(cluster)]):
        await asyncio.sleep(_STOPPED_S)


async def _kill_router(cluster: LocalCluster) -> None:
    cluster.kill(ROUTER)
    await _again(cluster, ROUTER)


async def _stop_router(cluster: LocalCluster) -> None:
    async with stopped([cluster.services[ROUTER].pid]):
        await asyncio.sleep(_STOPPED_S)


async def _stop_orchestrator(cluster: LocalCluster) -> None:
    async with stopped([cluster.services[ORCHESTRATOR].pid]):
        await asyncio.sleep(_STOPPED_S)


STRIKES = (
    Strike("kill_node", f"SIGKILL of {NODE} and its ranks, down for {_DOWN_S:g} s", _kill_node),
    Strike("stop_node", f"SIGSTOP of {NODE} and its ranks for {_STOPPED_S:g} s", _stop_node),
    Strike("kill_rank", f"SIGKILL of a rank of {NODE}", _kill_rank),
    Strike("stop_rank", f"SIGSTOP of a rank of {NODE} for {_STOPPED_S:g} s", _stop_rank),
    Strike("kill_router", f"SIGKILL of {ROUTER}, down for {_DOWN_S:g} s", _kill_router),
    Strike("stop_router", f"SIGSTOP of {ROUTER} for {_STOPPED_S:g} s", _stop_router),
    Strike("stop_orchestrator", f"SIGSTOP of the orchestrator for {_STOPPED_S:g} s", _stop_orchestrator),
)


def order(seed: int) -> Callable[[], Strike]:
    """Returns what gives the next strike: each once in a random order, then each again in another."""
    rng, left = random.Random(seed), list[Strike]()

    def following() -> Strike:
        if not left:
            left.extend(rng.sample(STRIKES, len(STRIKES)))
        return left.pop()

    return following


async def _again(cluster: LocalCluster, name: str) -> None:
    await asyncio.sleep(_DOWN_S)
    await asyncio.to_thread(cluster.restart, name)


async def _rank(cluster: LocalCluster) -> int:
    node = Peer(PeerRole.NODE, NODE)
    async with cluster.dialer.open(cluster.services[NODE].grpc_address, node) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_STATUS_S)
    return status.ranks[0].pid
