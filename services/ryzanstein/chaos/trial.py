"""One run of one fault: bring the load up, strike in the middle of a stream, watch, lift the fault, mend, judge everything."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace

from ryzanstein.chaos import evidence
from ryzanstein.chaos.beats import BeatCounter
from ryzanstein.chaos.evidence import Moment
from ryzanstein.chaos.fault import Fault, Scope, Victim
from ryzanstein.chaos.logs import LogLine
from ryzanstein.chaos.observation import Observation
from ryzanstein.chaos.reading import Reading
from ryzanstein.chaos.scrape import Samples, moved
from ryzanstein.chaos.stage import LaboratoryError, Stage

_AIM_S = 60.0
_STREAM_S = 60.0
_MEND_S = 90.0
# A stream is in its middle from this token on, as long as so many are still to come.
_BEGUN, _LEFT = 8, 60
_CALM_S = 2.0
_ASKED_BESIDE = 4


@dataclass(frozen=True, slots=True)
class Usual:
    """What moves and what is logged without a fault."""

    metrics: frozenset[str]
    lines: frozenset[str]


@dataclass(frozen=True, slots=True)
class Strike:
    """What was seen from the strike to its end."""

    moment: Moment
    stuck: list[Reading]
    beats: int
    metrics: Mapping[str, Samples]


class Trials:
    """Runs faults on one stage, one after the other."""

    def __init__(self, stage: Stage, seed: str) -> None:
        self._stage = stage
        self._seed = seed
        self._usual = Usual(frozenset(), frozenset())

    async def calm(self) -> Observation:
        """A while of full load without a fault: it must be flawless, and it tells what is usual."""
        stage = self._stage
        before = await stage.metrics()
        stage.load.set_width(stage.load.num_clients)
        await asyncio.sleep(_CALM_S)
        await stage.load.until_ended(stage.load.under_way, _STREAM_S)
        await stage.mend(_MEND_S)  # what the laboratory itself asks is usual too
        lines = stage.logs.read()
        growth = moved(before, await stage.metrics())
        self._usual = Usual(frozenset(growth), frozenset(map(evidence.kind_of, lines)))
        seen = self._judged(Observation("", 0, "", 0, 0), stage.load.take_ended(), [])
        if seen.lost or seen.repeated or seen.failed or seen.changed:
            raise LaboratoryError(f"without a fault: {seen}")
        return seen

    async def run(self, fault: Fault, run: int) -> Observation:
        """LaboratoryError: the cluster could not be brought back to what it was."""
        stage, rng = self._stage, random.Random(f"{self._seed}/{fault.name}/{run}")
        await self._prepare(fault)
        before = await stage.metrics()
        stage.logs.skip()
        stage.load.set_width(stage.load.num_clients)
        victim = await self._aim(fault, rng, run)
        strike = await self._strike(fault, victim, run)
        lifted_at = time.monotonic()
        whole = await stage.mend(_MEND_S)
        whole_s = time.monotonic() - lifted_at
        if fault.beside is not None:
            await stage.learn(fault.beside(run))
        seen = self._read(fault, run, victim, strike, stage.logs.read())
        growth = moved(before, strike.metrics) | moved(before, await stage.metrics())
        seen = replace(
            seen,
            whole_s=whole_s if whole else None,
            metrics=Counter(name for name in growth if name not in self._usual.metrics),
        )
        return self._judged(seen, stage.load.take_ended(), strike.stuck)

    async def _prepare(self, fault: Fault) -> None:
        if fault.layout.saboteur:
            await self._stage.look_at_ranks()

    async def _aim(self, fault: Fault, rng: random.Random, run: int) -> Victim:
        """Waits for a stream of a seeded kind, in a seeded place of its middle. A rolling fault has its node in turn."""
        stage = self._stage
        kind = rng.choice(fault.kinds)
        after = rng.randrange(_BEGUN, max(_BEGUN + 1, stage.longest(kind) - _LEFT))
        wanted = stage.cluster.node_ids[run % stage.layout.nodes] if fault.in_turn else ""

        def fits(reading: Reading) -> bool:
            return wanted in ("", reading.node_id) and stage.tokens_left(reading) >= _LEFT // 2

        try:
            reading = await stage.load.aim(kind, after, fits, _AIM_S)
        except TimeoutError:
            raise LaboratoryError(f"no stream of kind {kind} reached its token {after}") from None
        return Victim(reading, reading.node_id, stage.cluster.router_names[reading.router], rng)

    def _ask_beside(self, fault: Fault, run: int) -> list[Coroutine[None, None, list[Reading]]]:
        """By several users, so that the victim is among the nodes that answer."""
        if fault.beside is None:
            return []
        question = fault.beside(run)
        return [self._stage.load.ask(question, user) for user in range(_ASKED_BESIDE)]

    async def _strike(self, fault: Fault, victim: Victim, run: int) -> Strike:
        stage = self._stage
        addresses = (
            [stage.cluster.services[node_id].grpc_address for node_id in stage.cluster.node_ids] if fault.counts_beats else []
        )
        counter = BeatCounter()
        struck = _struck(fault.scope, victim, stage.load.under_way)
        stage.strikes_now()
        async with counter.listening(addresses), fault.strike(stage, victim) as victims:
            moment = self._hit(fault, struck, victims)
            beside = asyncio.gather(*self._ask_beside(fault, run))
            await stage.load.until_ended(list(moment.struck), fault.at_most_s)
            await asyncio.sleep(max(0.0, moment.monotonic_s + fault.lasts_s - time.monotonic()))
            metrics = await stage.metrics()
        stage.load.ended.extend(reading for readings in await beside for reading in readings)
        readings = stage.load.under_way if fault.lasts_s else list(moment.struck)
        done = await stage.load.until_ended(readings, _STREAM_S)
        stuck = [] if done else [reading for reading in readings if reading in stage.load.under_way]
        return Strike(moment, stuck, counter.count, metrics)

    def _hit(self, fault: Fault, struck: dict[Reading, int], victims: frozenset[str]) -> Moment:
        """A strike on several nodes hits the streams of all of them."""
        if fault.scope is Scope.NODE:
            struck |= {reading: reading.calls for reading in self._stage.load.under_way if reading.node_id in victims}
        return Moment(*self._stage.struck_at, struck, victims)

    def _read(self, fault: Fault, run: int, victim: Victim, strike: Strike, lines: Sequence[LogLine]) -> Observation:
        moment = strike.moment
        detected_s, detected_by = evidence.detection(fault, lines, moment)
        serving_s, startup_s = evidence.restart(lines, moment)
        return Observation(
            fault.name,
            run,
            victim.reading.kind,
            streams=0,
            struck=len(moment.struck),
            detected_s=detected_s,
            detected_by=detected_by,
            rerouted_s=evidence.rerouting(lines, moment),
            first_token_s=evidence.first_token(fault, moment),
            serving_s=serving_s,
            startup_s=startup_s,
            log_lines=Counter(set(evidence.unusual_lines(lines, self._usual.lines))),
            beats=strike.beats,
            alarms=evidence.alarms(lines) if fault.counts_beats else 0,
        )

    def _judged(self, seen: Observation, ended: Sequence[Reading], stuck: Sequence[Reading]) -> Observation:
        """With what clients saw of every answer that ended since the last run, and of those that did not end."""
        for reading in stuck:
            reading.failure = reading.failure or f"not answered within {_STREAM_S:g} s"
        readings = [*ended, *(reading for reading in stuck if reading not in ended)]
        verdicts = [self._stage.judge(reading) for reading in readings]
        failures = [f"{reading.kind}: {reading.failure}" for reading in readings if reading.failure]
        failures += [
            f"{reading.kind}: {what}" for reading, each in zip(readings, verdicts, strict=True) for what in each.differences
        ]
        return replace(
            seen,
            streams=len(readings),
            tokens=sum(reading.num_tokens for reading in readings),
            lost=sum(verdict.lost for verdict in verdicts),
            repeated=sum(verdict.repeated for verdict in verdicts),
            failed=sum(verdict.failed for verdict in verdicts),
            changed=sum(bool(verdict.differences) for verdict in verdicts),
            failures=tuple(failures[:8]),
            troubles=Counter(trouble for reading in readings for trouble in reading.troubles),
        )


def _struck(scope: Scope, victim: Victim, under_way: Sequence[Reading]) -> dict[Reading, int]:
    """The streams that are hit, with how many calls each has made."""

    def hit(reading: Reading) -> bool:
        match scope:
            case Scope.NODE:
                return reading.node_id == victim.node_id
            case Scope.ROUTER:
                return reading.router == victim.reading.router
            case Scope.READER:
                return reading is victim.reading
            case Scope.ALL:
                return True

    return {reading: reading.calls for reading in under_way if hit(reading)}
