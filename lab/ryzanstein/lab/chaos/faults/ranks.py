"""Ranks of a node: killed, frozen, slow, out of memory, out of step, wrong."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Sign, Victim
from ryzanstein.lab.chaos.machines.child import Child
from ryzanstein.lab.chaos.questions import long_prompt
from ryzanstein.lab.chaos.stage.layouts import RANKS
from ryzanstein.lab.chaos.stage.signals import send, stopped
from ryzanstein.lab.chaos.stage.stage import Stage

SKIP_COLLECTIVE = signal.SIGRTMIN + 1
NAN_LOGITS = signal.SIGRTMIN + 2
SLOWER = 20
_RANKS_LOST = Sign("node", "ranks lost")
# Both the worker and the router watch for work that does not move.
_STALLED = (_RANKS_LOST, Sign("router", "node suspected"))
_DEATH_S, _STALL_S, _SERVING_S = 0.05, 3.0, 5.0
_OUT_OF_MEMORY_S = 2.0
# Long enough for a worker to name the rank, which it does after five seconds.
_SLOW_S = 8.0


def _rank(stage: Stage, victim: Victim, rank: int) -> int:
    return stage.rank_pids[victim.node_id][rank]


def _any_rank(stage: Stage, victim: Victim) -> int:
    return victim.rng.choice(stage.rank_pids[victim.node_id])


@asynccontextmanager
async def _sigkill_0(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    send(_rank(stage, victim, 0), signal.SIGKILL)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _sigkill_1(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    send(_rank(stage, victim, 1), signal.SIGKILL)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _sigstop(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    async with stopped([_any_rank(stage, victim)]):
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _skip_collective(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    send(_any_rank(stage, victim), SKIP_COLLECTIVE)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _nan_logits(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    send(_any_rank(stage, victim), NAN_LOGITS)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _slow(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    pid = _any_rank(stage, victim)
    throttle = Child(
        (sys.executable, "-P", "-m", "ryzanstein.lab.chaos.machines.throttle", str(pid), str(SLOWER)), interactive=True
    )
    throttle.start()
    try:
        yield frozenset({victim.node_id})
    finally:
        throttle.release()
        send(pid, signal.SIGCONT)


@asynccontextmanager
async def _out_of_memory(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Keeps all ranks of the node from mapping more memory; they keep what they have."""
    pids = stage.rank_pids[victim.node_id]
    try:
        for pid in pids:
            _limit(pid, psutil.Process(pid).memory_info().vms)
        yield frozenset({victim.node_id})
        await asyncio.sleep(0)
    finally:
        for pid in pids:
            _limit(pid, resource.RLIM_INFINITY)


def _limit(pid: int, address_space_bytes: int) -> None:
    try:
        hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
        resource.prlimit(pid, resource.RLIMIT_AS, (address_space_bytes, hard))
    except ProcessLookupError:
        return


FAULTS = (
    Fault("sigkill_rank_0", "SIGKILL of rank 0", _sigkill_0, (_RANKS_LOST,), RANKS, bounds=FaultBounds(_DEATH_S, _SERVING_S)),
    Fault("sigkill_rank_1", "SIGKILL of rank 1", _sigkill_1, (_RANKS_LOST,), RANKS, bounds=FaultBounds(_DEATH_S, _SERVING_S)),
    Fault(
        "sigstop_rank",
        "SIGSTOP of one rank",
        _sigstop,
        _STALLED,
        RANKS,
        bounds=FaultBounds(_STALL_S, _SERVING_S),
        # A rank that continues before its node has noticed needs no restart: the router may be
        # faster.
        lasts_s=_STALL_S,
    ),
    Fault(
        "skipped_collective",
        "one rank skips one all-reduce",
        _skip_collective,
        _STALLED,
        RANKS,
        bounds=FaultBounds(_STALL_S, _SERVING_S),
    ),
    Fault(
        "slow_rank",
        f"one rank {SLOWER} times slower, for {_SLOW_S:g} s",
        _slow,
        (_RANKS_LOST, Sign("router", "node suspected"), Sign("node", "rank slow")),
        RANKS,
        resumes=Resume.ANY,
        bounds=FaultBounds(),
        lasts_s=_SLOW_S,
        at_most_s=_SLOW_S,
    ),
    Fault(
        "rank_out_of_memory",
        "the ranks of a node cannot map more memory while long prompts arrive",
        _out_of_memory,
        (_RANKS_LOST, Sign("node", "step retried in smaller parts"), Sign("node", "generation failed")),
        RANKS,
        resumes=Resume.ANY,
        bounds=FaultBounds(),
        lasts_s=_OUT_OF_MEMORY_S,
        alongside=long_prompt,
    ),
    Fault(
        "nan_logits",
        "one step of one rank computes NaN",
        _nan_logits,
        (_RANKS_LOST, Sign("node", "generation failed")),
        RANKS,
        bounds=FaultBounds(),
    ),
)
