"""One run of several faults on the same long answers, one after another.

An answer of a minute is too long to be struck only once. All clients begin at the same moment, and
the faults come in the order of the catalog. Each comes no sooner than an answer is `LATE_S` old and
`GAP_S` after the last fault, which is longer than a generation waits for a node: neither the age of
an answer nor that of its attempt may count against it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ryzanstein.lab.chaos.fault import Fault, Victim
from ryzanstein.lab.chaos.stage.logs import LogLine
from ryzanstein.lab.chaos.stage.scrape import moved
from ryzanstein.lab.chaos.stage.stage import LaboratoryError, Stage
from ryzanstein.lab.chaos.trial import findings
from ryzanstein.lab.chaos.trial.findings import Strike, Usual
from ryzanstein.lab.chaos.trial.observation import Observation
from ryzanstein.lab.clients.reading import AnswerReading

LATE_S = 20.0
GAP_S = 15.5
_AIM_S = 120.0
_STREAM_S = 180.0
_MEND_S = 90.0
# This many tokens are still to come; they take some seconds.
_LEFT = 60


@dataclass(frozen=True, slots=True)
class Struck:
    """One of the faults, and what was seen of it until the next."""

    fault: Fault
    strike: Strike
    lines: Sequence[LogLine]
    growth: dict[str, float]
    whole_s: float | None


class Series:
    """Runs faults on one stage with long answers. `usual` is what changes without a fault."""

    def __init__(self, stage: Stage, seed: str, usual: Usual) -> None:
        self._stage = stage
        self._seed = seed
        self._usual = usual

    async def run(self, faults: Sequence[Fault], run: int) -> list[Observation]:
        """Runs the faults and returns one observation of each.

        Raises LaboratoryError if the answers of the last run do not end, or none gets old enough.
        """
        stage, rng = self._stage, random.Random(f"{self._seed}/{faults[0].name}/{run}")
        await self._until_idle()
        with self._paced():
            stage.load.set_width(stage.load.num_clients)
            seen = [await self._struck(fault, rng, last=fault is faults[-1]) for fault in faults]
        if not await stage.mend(_MEND_S):
            seen[-1] = replace(seen[-1], whole_s=None)
        return self._judged(seen, run, stage.load.take_ended())

    async def _until_idle(self) -> None:
        self._stage.load.set_width(0)
        if not await self._stage.load.until_ended(self._stage.load.under_way, _STREAM_S):
            raise LaboratoryError("the answers of the previous run did not end")

    @contextmanager
    def _paced(self) -> Iterator[None]:
        pace = self._stage.plan.pace
        assert pace is not None, "the layout has a pace"
        pace.set(self._stage.layout.step_s)
        try:
            yield
        finally:
            pace.set(0.0)

    async def _struck(self, fault: Fault, rng: random.Random, *, last: bool) -> Struck:
        stage = self._stage
        await stage.look_at_ranks()
        victim = await self._aim(rng)
        stage.logs.skip()
        before = await stage.metrics()
        strike, whole_s = await self._strike(fault, victim, last=last)
        growth = moved(before, strike.metrics) | moved(before, await stage.metrics())
        return Struck(fault, strike, stage.logs.read(), growth, whole_s)

    async def _aim(self, rng: random.Random) -> Victim:
        """Returns the first answer that is old and still has tokens to come."""

        def fits(reading: AnswerReading) -> bool:
            known = bool(reading.node_id)  # over HTTP the node is not reported
            return known and reading.age_s >= LATE_S and self._stage.tokens_left(reading) >= _LEFT

        try:
            reading = await self._stage.load.aim("", 1, fits, _AIM_S)
        except TimeoutError:
            raise LaboratoryError(f"no answer was {LATE_S:g} s old") from None
        return Victim(reading, reading.node_id, self._stage.cluster.router_names[reading.router], rng)

    async def _strike(self, fault: Fault, victim: Victim, *, last: bool) -> tuple[Strike, float | None]:
        """Strikes. Also returns how long all nodes then took to serve.

        The last fault waits for the ends of the answers.
        """
        stage = self._stage
        struck = findings.struck_by(fault.scope, victim, stage.load.under_way)
        stage.strikes_now()
        async with fault.strike(stage, victim) as victims:
            moment = findings.moment_of(stage, fault, struck, victims)
            await asyncio.sleep(max(0.0, moment.monotonic_s + fault.lasts_s - time.monotonic()))
            metrics = await stage.metrics()
        lifted_at = time.monotonic()
        whole = await stage.serving(_MEND_S)
        whole_s = time.monotonic() - lifted_at if whole else None
        return Strike(victim.reading.kind, moment, await self._over(moment.struck, last=last), 0, metrics), whole_s

    async def _over(self, struck: Iterable[AnswerReading], *, last: bool) -> list[AnswerReading]:
        """Waits for the next fault's time, or for the ends. Returns the streams that do not end."""
        load = self._stage.load
        if not last:
            await load.until_ended(list(struck), GAP_S)
            return []
        load.set_width(0)
        readings = load.under_way
        return [] if await load.until_ended(readings, _STREAM_S) else [each for each in readings if each in load.under_way]

    def _judged(self, seen: Sequence[Struck], run: int, ended: Sequence[AnswerReading]) -> list[Observation]:
        return [self._observation(each, run, answers_of(seen, i, ended)) for i, each in enumerate(seen)]

    def _observation(self, seen: Struck, run: int, ended: Sequence[AnswerReading]) -> Observation:
        read = findings.read(seen.fault, run, seen.strike, seen.lines, self._usual)
        read = replace(read, whole_s=seen.whole_s, metrics=findings.unusual(seen.growth, self._usual))
        return findings.judged(self._stage, read, ended, seen.strike.stuck, _STREAM_S)


def answers_of(seen: Sequence[Struck], which: int, ended: Sequence[AnswerReading]) -> list[AnswerReading]:
    """Returns the answers that count with one of the faults.

    An answer counts with every fault that hit it. A failed one counts with the last fault that hit
    it, and one without hits with the last of all.
    """

    def counts(reading: AnswerReading) -> bool:
        hit = [i for i, each in enumerate(seen) if reading in each.strike.moment.struck] or [len(seen) - 1]
        return hit[-1] == which if reading.failure else which in hit

    return [reading for reading in ended if counts(reading)]
