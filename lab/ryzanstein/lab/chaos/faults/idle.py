"""An hour without any request, and then a request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.machines.fast_clock import RATE
from ryzanstein.lab.chaos.stage.layouts import IDLE
from ryzanstein.lab.chaos.stage.signals import send
from ryzanstein.lab.chaos.stage.stage import LaboratoryError, Stage

LONG_STEP = signal.SIGRTMIN + 3
_HOUR_S = 3600.0
_STREAM_S = 60.0
# The load lasts this long: longer than a restart of a group takes for a fault of the hour.
_LOAD_S = 3.0
# Every client has sent its request by then.
_ASKED_S = 0.05
_RANKS_LOST = Sign("node", "ranks lost")


@asynccontextmanager
async def _an_hour_passes(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Lets an hour pass without requests, then restores the load.

    The first step of one rank of each node then takes longer, as it may after an hour: its memory
    was given to others in the meantime.
    """
    clock = stage.plan.fast_clock
    assert clock is not None, "the layout has a fast clock"
    stage.load.set_width(0)
    if not await stage.load.until_ended(stage.load.under_way, _STREAM_S):
        raise LaboratoryError("the answers before the hour did not end")
    await clock.pass_time(_HOUR_S)
    for pids in stage.rank_pids.values():
        send(victim.rng.choice(pids), LONG_STEP)
    stage.strikes_now()
    stage.load.set_width(stage.load.num_clients)
    await asyncio.sleep(_ASKED_S)
    yield frozenset()


FAULTS = (
    Fault(
        "idle_hour",
        f"an hour without a request, on clocks {RATE:g} times as fast; the next step of a rank takes 0.5 s longer",
        _an_hour_passes,
        (_RANKS_LOST,),
        IDLE,
        scope=Scope.ALL,
        resumes=Resume.ANY,
        bounds=FaultBounds(rerouted_s=None),
        lasts_s=_LOAD_S,
        runs_divisor=10,
        unwanted=(_RANKS_LOST, Sign("node", "rank slow"), Sign("router", "generation failed over")),
    ),
)
