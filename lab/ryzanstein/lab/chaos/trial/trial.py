"""One run of one fault.

It raises the load, strikes in the middle of a stream, watches, lifts the fault, mends, and judges
all answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from ryzanstein.lab.chaos.fault import Fault, Victim
from ryzanstein.lab.chaos.stage.scrape import moved
from ryzanstein.lab.chaos.stage.stage import LaboratoryError, Stage
from ryzanstein.lab.chaos.trial import evidence, findings
from ryzanstein.lab.chaos.trial.beats import LISTENER, BeatCounter
from ryzanstein.lab.chaos.trial.findings import Aftermath, Strike, Usual
from ryzanstein.lab.chaos.trial.observation import Observation
from ryzanstein.lab.chaos.trial.spared import longest_pause, node_of
from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.reading import AnswerReading

_AIM_S = 60.0
_STREAM_S = 60.0
# Long answers too; nothing slows them down here.
_CALM_STREAM_S = 180.0
_MEND_S = 90.0
# A stream is in its middle from this token on, as long as this many tokens are still to come.
_BEGUN, _LEFT = 8, 60
_CALM_S = 2.0
_ASKED_ALONGSIDE = 4


class Trials:
    """Runs faults on one stage, one after another."""

    def __init__(self, stage: Stage, seed: str) -> None:
        self._stage = stage
        self._seed = seed
        self.usual = Usual()

    async def calm(self) -> Observation:
        """Runs full load for a while without a fault.

        It must be flawless, and it shows what is usual.
        """
        stage = self._stage
        before = await stage.metrics()
        began = time.monotonic()
        stage.load.set_width(stage.load.num_clients)
        await asyncio.sleep(_CALM_S)
        await stage.load.until_ended(stage.load.under_way, _CALM_STREAM_S)
        await stage.mend(_MEND_S)  # requests of the laboratory itself are usual too
        lines = stage.logs.read()
        growth = moved(before, await stage.metrics())
        ended = stage.load.take_ended()
        pause_s = longest_pause(ended, began, time.monotonic())
        self.usual = Usual(frozenset(growth), frozenset(map(evidence.kind_of, lines)), pause_s)
        seen = findings.judged(stage, Observation("", 0, "", 0, 0), ended, [], _STREAM_S)
        if not seen.streams or seen.lost or seen.repeated or seen.failed or seen.changed or seen.invalid:
            raise LaboratoryError(f"wrong answers without a fault: {seen}")
        return seen

    async def run(self, fault: Fault, run: int) -> Observation:
        """Runs a fault once.

        Raises LaboratoryError, for example if no stream of the chosen kind gets far enough to be
        struck.
        """
        stage, rng = self._stage, random.Random(f"{self._seed}/{fault.name}/{run}")
        await self._prepare(fault)
        before = await stage.metrics()
        stage.logs.skip()
        stage.load.set_width(stage.load.num_clients)
        async with self._asked(fault, run) as own:
            victim = await self._aim(fault, rng, run, own)
            strike = await self._strike(fault, victim, run)
        lifted_at = time.monotonic()
        whole = await stage.mend(_MEND_S)
        whole_s = time.monotonic() - lifted_at
        for question in (*own, *self._sibling(fault, run, victim)):
            await stage.learn(question)
        lines = stage.logs.read()
        seen = findings.read(fault, run, strike, lines, self.usual)
        growth = moved(before, strike.metrics) | moved(before, await stage.metrics())
        seen = replace(
            seen,
            whole_s=whole_s if whole else None,
            metrics=findings.unusual(growth, self.usual),
        )
        ended = stage.load.take_ended()
        if fault.spared_pause_s is not None:
            seen = findings.spared(stage, seen, ended, Aftermath(strike.moment, lifted_at + whole_s, lines, self.usual))
        return findings.judged(stage, seen, ended, strike.stuck, _STREAM_S)

    async def _prepare(self, fault: Fault) -> None:
        if fault.layout.saboteur or fault.layout.further_models:
            await self._stage.look_at_ranks()

    @asynccontextmanager
    async def _asked(self, fault: Fault, run: int) -> AsyncIterator[list[LoadQuestion]]:
        """Asks the fault's own question, if it has one, and waits for the whole answer on exit."""
        if fault.own is None:
            yield []
            return
        question = fault.own(run)
        asking = asyncio.create_task(self._stage.load.ask(question, run))
        try:
            yield [question]
            self._stage.load.ended.extend(await asking)
        finally:
            asking.cancel()

    async def _aim(self, fault: Fault, rng: random.Random, run: int, own: Sequence[LoadQuestion]) -> Victim:
        """Waits for a stream of a seeded kind, or of the fault's own question, at a seeded place in its middle.

        A rolling fault takes the nodes in turn.
        """
        stage = self._stage
        kind = own[0].kind if own else rng.choice(fault.kinds)
        longest = int(own[0].sampling["max_tokens"]) if own else stage.longest(kind)
        after = rng.randrange(_BEGUN, max(_BEGUN + 1, longest - _LEFT))
        wanted = stage.cluster.node_ids[run % stage.layout.nodes] if fault.in_turn else ""

        def fits(reading: AnswerReading) -> bool:
            if own:
                return True
            if fault.spared_pause_s is not None and not self._is_accompanied(reading):
                return False
            if stage.plan.servers and reading.node_id not in stage.plan.servers:
                return False  # the node in reserve ends an answer that it took over in the run before
            return wanted in ("", reading.node_id) and stage.tokens_left(reading) >= _LEFT // 2

        try:
            reading = await stage.load.aim(kind, after, fits, own[0].call_s if own else _AIM_S)
        except TimeoutError:
            raise LaboratoryError(f"no stream of kind {kind} reached token {after}") from None
        return Victim(reading, reading.node_id, stage.cluster.router_names[reading.router], rng)

    def _is_accompanied(self, reading: AnswerReading) -> bool:
        """Returns whether the same node is in the middle of an answer of another model."""
        node = node_of(reading.node_id)
        others = (each for each in self._stage.load.under_way if each.model != reading.model and node_of(each.node_id) == node)
        return any(each.num_tokens >= _BEGUN and self._stage.tokens_left(each) >= _LEFT // 2 for each in others)

    def _sibling(self, fault: Fault, run: int, victim: Victim) -> list[LoadQuestion]:
        """Returns the question to ask besides the load, if any, to the victim's model."""
        if fault.alongside is None:
            return []
        question, model = fault.alongside(run), victim.reading.model
        return [question.to(model) if model else question]

    def _ask_alongside(self, fault: Fault, run: int, victim: Victim) -> list[Coroutine[None, None, list[AnswerReading]]]:
        """Asks as several users, so that the victim is among the nodes that answer."""
        questions = self._sibling(fault, run, victim)
        return [self._stage.load.ask(question, user) for question in questions for user in range(_ASKED_ALONGSIDE)]

    async def _strike(self, fault: Fault, victim: Victim, run: int) -> Strike:
        stage = self._stage
        nodes = stage.cluster.node_ids if fault.counts_beats else []
        addresses = {node_id: stage.cluster.services[node_id].grpc_address for node_id in nodes}
        counter = BeatCounter(stage.listener(LISTENER))
        struck = findings.struck_by(fault.scope, victim, stage.load.under_way)
        stage.strikes_now()
        async with counter.listening(addresses), fault.strike(stage, victim) as victims:
            moment = findings.moment_of(stage, fault, struck, victims)
            alongside = asyncio.gather(*self._ask_alongside(fault, run, victim))
            await stage.load.until_ended(list(moment.struck), fault.at_most_s)
            await asyncio.sleep(max(0.0, moment.monotonic_s + fault.lasts_s - time.monotonic()))
            metrics = await stage.metrics()
        stage.load.ended.extend(reading for readings in await alongside for reading in readings)
        readings = stage.load.under_way if fault.lasts_s else list(moment.struck)
        done = await stage.load.until_ended(readings, _STREAM_S)
        stuck = [] if done else [reading for reading in readings if reading in stage.load.under_way]
        return Strike(victim.reading.kind, moment, stuck, counter.count, metrics)
