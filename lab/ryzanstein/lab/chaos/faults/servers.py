"""Inference servers beside nodes: killed, hung, all gone while a node of ours is in reserve.

The agents live. What computes for them is not theirs, so they never restart it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.machines.llama.server import LlamaServer
from ryzanstein.lab.chaos.stage.layouts import SERVERS
from ryzanstein.lab.chaos.stage.signals import stopped
from ryzanstein.lab.chaos.stage.stage import Stage

_LOST = Sign("node", "ranks lost", {"cause": ("RANK_LOST", "RANK_STALLED")})
_KINDS = ("greedy", "stop", "session")
# A stall takes two seconds or ten steps; of an idle server, a second to the next check and its two seconds; while it
# computes a prompt, a second and four.
_DEATH_S, _HUNG_S = 0.3, 5.5
_STOPPED_S = 4.0  # an answer may be complete when its server is stopped: then nothing is missed before the next check


@asynccontextmanager
async def _gone(servers: Collection[LlamaServer]) -> AsyncIterator[None]:
    for server in servers:
        server.kill()
    try:
        yield
    finally:
        for server in servers:
            await asyncio.to_thread(server.start)


@asynccontextmanager
async def _killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    async with _gone([stage.plan.servers[victim.node_id]]):
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _hung(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    pid = stage.plan.servers[victim.node_id].pid
    async with stopped([] if pid is None else [pid]):
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _all_gone(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    async with _gone(list(stage.plan.servers.values())):
        yield frozenset(stage.plan.servers)


FAULTS = (
    Fault(
        "server_killed",
        "SIGKILL of the inference server beside a node",
        _killed,
        (_LOST,),
        SERVERS,
        bounds=FaultBounds(_DEATH_S),
        kinds=_KINDS,
    ),
    Fault(
        "server_hung",
        "SIGSTOP of the inference server beside a node",
        _hung,
        (_LOST,),
        SERVERS,
        bounds=FaultBounds(_HUNG_S),
        lasts_s=_STOPPED_S,
        kinds=_KINDS,
    ),
    Fault(
        "all_servers_killed",
        "SIGKILL of all inference servers, a node with ranks is in reserve",
        _all_gone,
        (_LOST,),
        SERVERS,
        scope=Scope.ALL,
        resumes=Resume.MOVED,
        bounds=FaultBounds(_DEATH_S, rerouted_s=None),
        kinds=_KINDS,
    ),
)
