"""Runs a generation on the nodes: placement, attempts and failover, until its log is complete.

After a fault the next candidate gets attempt + 1 with the prompt and, separately, the generated
tokens. On mere suspicion a hedge starts beside the first attempt: the first to produce the next
token wins, and the other is cancelled. A false alarm costs work, never correctness.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial

import structlog

from ryzanstein.generation.request import Attempt
from ryzanstein.observe.tracing import Tracing
from ryzanstein.router.failover.attempt import (
    BACK_PRESSURE,
    NO_PROGRESS,
    NODE_FAULT,
    OTHER_PROMPT,
    REFUSED,
    REQUEST_FAULT,
    SLOW,
    AttemptEvent,
    AttemptRun,
    Complete,
    Lost,
    Rejected,
    Suspected,
    Worked,
)
from ryzanstein.router.failover.hedges import HedgeBudget
from ryzanstein.router.failover.placement import NodePlacement, RunnerPolicy
from ryzanstein.router.failover.spans import AttemptSpans
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.nodes.links.connection import PROTOCOL
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

# Attempts are numbered from epoch * 2**16: the wire's uint32 has room for 65,536 attempts of each
# router, and for 65,536 routers.
_EPOCH_SHIFT = 16


@dataclass(slots=True)
class _Reroute:
    """Why an attempt other than the first was started, and how long that took."""

    cause: str
    from_node: str
    from_attempt: int
    detected_at: float
    took_s: float = 0.0


class Runner:
    """Runs one generation.

    `run` it once, as a task; cancelling it cancels the generation on its nodes.
    """

    def __init__(
        self,
        generation: Generation,
        links: Roster,
        policy: RunnerPolicy,
        hedges: HedgeBudget,
        *,
        telemetry: RouterTelemetry,
        tracing: Tracing,
    ) -> None:
        self._generation = generation
        self._links = links
        self._patience = policy.patience
        self._placing = NodePlacement(generation, links, policy, telemetry)
        self._hedges = hedges
        self._racing = False
        self._telemetry = telemetry
        self._spans = AttemptSpans(tracing, generation.request.traceparent)
        self._events: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        self._runs: dict[AttemptRun, _Reroute | None] = {}
        generation.attempts = self._runs.keys()
        if generation.log.num_tokens and generation.origin is None:  # an earlier router's, of the journal
            generation.origin = links.origin_of(generation.log.last_node)
        # Higher than every attempt of earlier routers and of earlier runs here.
        generation.next_attempt = max(generation.next_attempt, generation.epoch << _EPOCH_SHIFT)
        self._looking: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Runs until the log is complete.

        Raises the client's error, or UNAVAILABLE when no node finished the generation. Cancelling
        it cancels the attempts.
        """
        if self._generation.log.complete:
            return
        self._look_in(self._patience.accept_s)
        try:
            self._start(await self._placing.first(), None)
            while not self._generation.log.complete:
                await self._handle(await self._events.get())
                if len(self._runs) < 2:
                    self._end_race()
        finally:
            if self._looking is not None:
                self._looking.cancel()
            for run in self._runs:
                self._abandon(run)
                self._hedges.forget(run)
            self._runs.clear()
            self._spans.close()
            self._end_race()

    def _end_race(self) -> None:
        if self._racing:
            self._racing = False
            self._hedges.give()

    def _look(self) -> None:
        """Alarms attempts that have been quiet for too long.

        Their nodes work for others but have forgotten them. Looks again when the first attempt
        could be forgotten.
        """
        patience, now = self._patience, time.monotonic()
        awake = self._links.awake
        for run in self._runs:
            if patience.waits(run.quiet):
                run.wait()
        left_s = {run: patience.left_s(run.quiet, now - awake.slept_since(run.quiet.since)) for run in self._runs}
        for run in [run for run, left in left_s.items() if left <= 0]:
            self._alarm(run)
        again_s = min((left for left in left_s.values() if left > 0), default=patience.accept_s)
        self._look_in(min(again_s, patience.accept_s))

    def _look_in(self, seconds: float) -> None:
        self._looking = asyncio.get_running_loop().call_later(seconds, self._look)

    def _alarm(self, run: AttemptRun) -> None:
        """Decides about an attempt that was quiet for too long: at first, another node may try beside it.

        The next time a forgotten attempt is given up. One that is only slow is moved once, if another
        node could take it and none has tried beside it: begun again where it came from, it would be
        slower still.
        """
        if not run.alarmed:
            run.alarm()
        elif run.forgotten:
            run.give_up(NO_PROGRESS)
        elif len(self._runs) == 1 and self._placing.faster_than(run.node_id):
            run.give_up(SLOW)
        else:
            run.wait()

    async def _handle(self, event: AttemptEvent) -> None:
        if event.run not in self._runs:
            return
        match event:
            case Worked(run):
                self._on_worked(run)
            case Suspected():
                self._hedge(event)
            case Lost():
                await self._on_lost(event)
            case Rejected(run, error):
                await self._on_lost(Lost(run, REFUSED, time.monotonic(), error))
            case Complete(run):
                run.release()
                self._runs.pop(run)
                self._spans.end(run.attempt)

    def _on_worked(self, run: AttemptRun) -> None:
        self._breaker_worked(run.node_id)
        self._placing.worked(run.node_id, run.attempt, run.learned_origin())
        for other in [other for other in self._runs if other is not run]:
            self._abandon(other)
            self._decide_race(run, other)

    def _abandon(self, run: AttemptRun) -> None:
        run.abandon()
        if (breaker := self._links.breaker(run.node_id)) is not None:
            breaker.withdrawn()

    def _decide_race(self, winner: AttemptRun, loser: AttemptRun) -> None:
        reroute = self._runs[winner]
        del self._runs[loser]
        self._spans.end(loser.attempt)
        if reroute is None or loser.attempt > winner.attempt:
            self._telemetry.hedges.labels("false_alarm").inc()
            return
        self._telemetry.hedges.labels("won").inc()
        if (breaker := self._links.breaker(loser.node_id)) is not None:
            # A node that works for others may only be slow with this attempt: its breaker opens
            # only after a few such faults in a row.
            (breaker.fault if reroute.cause == NO_PROGRESS else breaker.open)()
        self._report(winner, reroute)

    async def _on_lost(self, lost: Lost) -> None:
        reroute = self._runs.pop(lost.run)
        self._spans.end(lost.run.attempt, lost.cause)
        self._blame(lost)
        self._placing.note(lost)
        if not self._runs:
            self._start(await self._placing.next(lost), _Reroute(lost.cause, lost.run.node_id, lost.run.attempt, lost.at))
            return
        (left,) = self._runs
        remaining = self._runs[left]
        if remaining is not None and left.attempt > lost.run.attempt:
            self._telemetry.hedges.labels("took_over").inc()
            self._report(left, remaining)
        elif reroute is not None:
            self._telemetry.hedges.labels("lost").inc()

    def _blame(self, lost: Lost) -> None:
        """Reports the outcome of a lost attempt to the node's breaker.

        The end of a link is not reported here: the link does that itself, once and not for each
        generation.
        """
        breaker = self._links.breaker(lost.run.node_id)
        if breaker is None:
            return
        if lost.cause in (NODE_FAULT, NO_PROGRESS):
            breaker.fault()
        elif lost.cause == PROTOCOL:
            breaker.open()
        elif lost.cause in (BACK_PRESSURE, REQUEST_FAULT, REFUSED, OTHER_PROMPT, SLOW):
            breaker.worked()

    def _breaker_worked(self, node_id: str) -> None:
        if (breaker := self._links.breaker(node_id)) is not None:
            breaker.worked()

    def _hedge(self, suspicion: Suspected) -> None:
        """Starts a hedge for a suspected attempt, or waits until one can start.

        A suspicion is reported only once, so it is queued again here.
        """
        run = suspicion.run
        if len(self._runs) > 1:
            return
        again = partial(self._events.put_nowait, suspicion)
        nodes = self._placing.hedge_nodes(run.node_id)
        if not nodes:
            self._hedges.wait_for_node(run, partial(self._wants_hedge, run), again)
        elif not self._hedges.take():
            self._hedges.wait(run, partial(self._wants_hedge, run), again)
        else:
            self._racing = True
            self._telemetry.hedges.labels("started").inc()
            run.race()
            self._start(nodes[0], _Reroute(suspicion.cause, run.node_id, run.attempt, suspicion.at), hedge=True)

    def _wants_hedge(self, run: AttemptRun) -> bool:
        return run in self._runs and run.suspect

    def _start(self, node_id: str, reroute: _Reroute | None, *, hedge: bool = False) -> None:
        generation = self._generation
        self._placing.placed(node_id)
        number = generation.next_attempt
        generation.next_attempt += 1
        generation.num_attempts += 1
        generation.times.sent_at = generation.times.sent_at or time.monotonic()
        cause = "" if reroute is None else reroute.cause
        run = AttemptRun(generation, number, node_id, self._telemetry, self._events.put_nowait, cause=cause)
        if reroute is not None:
            run.on_submitted = partial(self._submitted, run, reroute, hedge)
        self._runs[run] = reroute
        generation.log.admit(number)
        accepted_before = generation.started is not None
        why = None if reroute is None else (reroute.cause, reroute.from_attempt)
        context = self._spans.begin(number, node_id, why, hedge=hedge)
        attempt = Attempt(
            generation.generation_id,
            number,
            generation.to_run if context == generation.to_run.traceparent else replace(generation.to_run, traceparent=context),
            generation.log.progress,
            accepted_before,
            self._placing.backup(node_id),
            self._placing.previous(node_id) if reroute is None else None,
            self._placing.conversation,
        )
        run.placement = self._links.start(node_id, attempt, run)

    def _submitted(self, run: AttemptRun, reroute: _Reroute, hedge: bool, at: float) -> None:
        reroute.took_s = at - reroute.detected_at
        self._telemetry.rerouted.observe(reroute.took_s)
        if not hedge:
            self._report(run, reroute)

    def _report(self, run: AttemptRun, reroute: _Reroute) -> None:
        self._telemetry.failovers.labels(reroute.cause).inc()
        log.warning(
            "generation failed over",
            generation_id=self._generation.generation_id,
            attempt=run.attempt,
            cause=reroute.cause,
            from_node=reroute.from_node,
            to_node=run.node_id,
            tokens=self._generation.log.num_tokens,
            detected_to_rerouted_s=round(reroute.took_s, 6),
        )
