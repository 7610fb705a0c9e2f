"""Pages that move: long contexts whose node dies, a stream to the backup that is cut, damaged pages, a full disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.faults.nodes import DEATH_S, LINK_DOWN
from ryzanstein.lab.chaos.questions import context_question
from ryzanstein.lab.chaos.stage.layouts import CONTEXT, TIERS
from ryzanstein.lab.chaos.stage.stage import LaboratoryError, Stage
from ryzanstein.lab.clients.question import LoadQuestion

_SILENCE_S = 1.0
_CUT_S = 1.0
_FULL_S = 2.0
_TURNS = 6  # those after the first come to a node that has started again meanwhile


@asynccontextmanager
async def _sigkill(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    stage.cluster.kill(victim.node_id)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _cut_then_killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Cuts the node off from the other nodes, while it sends them pages, and kills it a moment later."""
    others = [stage.address_of(node_id) for node_id in stage.cluster.node_ids if node_id != victim.node_id]
    inbound = tuple(f"ip saddr {address} drop" for address in others)
    outbound = tuple(f"ip daddr {address} drop" for address in others)
    async with stage.network.rules(stage.host_of(victim.node_id), inbound, outbound):
        await asyncio.sleep(_CUT_S)
        stage.strikes_now()
        stage.cluster.kill(victim.node_id)
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _damaged(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Kills a node, flips a bit in each of its pages on disk, and starts it again: its next turns read them."""
    service, folder = stage.cluster.services[victim.node_id], stage.plan.pages / victim.node_id
    if not _pages_in(folder):
        raise LaboratoryError(f"{victim.node_id} has no pages on disk")
    stage.cluster.kill(victim.node_id)
    for path in _pages_in(folder):
        _flip(path)
    await asyncio.to_thread(service.wait_ended, _CUT_S)
    service.kill()
    service.start()
    yield frozenset({victim.node_id})


def _pages_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*") if path.is_file()]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:  # SIGKILL can leave an empty file
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@asynccontextmanager
async def _disk_full(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    disk = stage.plan.pages_disk
    if disk is None:
        raise LaboratoryError("this fault needs permission to mount")
    for path in stage.plan.pages.glob("*/*/*"):
        path.unlink(missing_ok=True)  # a tier that is at its bound would make way for itself
    disk.fill()
    try:
        yield frozenset()
    finally:
        disk.empty()


def _context(name: str, num_tokens: int, turns: int = 1) -> partial[LoadQuestion]:
    return partial(context_question, name, num_tokens=num_tokens, turns=turns)


FAULTS = (
    Fault(
        "context_killed",
        "SIGKILL of a node in the middle of an answer after about 6,000 tokens",
        _sigkill,
        (LINK_DOWN,),
        CONTEXT,
        scope=Scope.READER,
        bounds=FaultBounds(DEATH_S, first_token_s=_SILENCE_S),
        own=_context("context", 6_000),
    ),
    Fault(
        "context_30k_killed",
        "the same after about 30,000 tokens",
        _sigkill,
        (LINK_DOWN,),
        CONTEXT,
        scope=Scope.READER,
        bounds=FaultBounds(DEATH_S, first_token_s=_SILENCE_S),
        own=_context("context-30k", 30_000),
        most_runs=1,
    ),
    Fault(
        "replica_stream_cut",
        f"the node that answers is cut off from the other nodes, and gets SIGKILL {_CUT_S:g} s later",
        _cut_then_killed,
        (LINK_DOWN,),
        CONTEXT,
        scope=Scope.READER,
        bounds=FaultBounds(DEATH_S),
        own=_context("cut", 3_000),
        needs_network=True,
    ),
    Fault(
        "pages_damaged",
        "SIGKILL of a node, one bit of each of its pages on disk is flipped, and it starts again",
        _damaged,
        (LINK_DOWN,),
        TIERS,
        scope=Scope.READER,
        bounds=FaultBounds(DEATH_S),
        own=_context("damaged", 1_500, _TURNS),
        runs_divisor=3,
    ),
    Fault(
        "page_disk_full",
        f"the nodes' pages on disk are deleted, and the disk is full for {_FULL_S:g} s",
        _disk_full,
        (Sign("node", "pages cannot be written"),),
        TIERS,
        scope=Scope.ALL,
        resumes=Resume.ANY,
        bounds=FaultBounds(rerouted_s=None),
        own=_context("full", 1_500),
        lasts_s=_FULL_S,
        at_most_s=_FULL_S,
        most_runs=1,  # the tier tries again after 30 s
        needs_network=True,
    ),
)
