"""The life of a generation on the nodes: place it, follow its attempts, move it on, until its log is complete.

On a fault the next candidate gets attempt + 1 with the prompt and the generated tokens, apart. On mere suspicion a backup
starts beside the first (a hedge): whoever brings the next index first wins, the other is cancelled. A false alarm costs work,
never correctness.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial

import structlog

from ryzanstein import errors
from ryzanstein.generation import Attempt
from ryzanstein.router.attempt import (
    BACK_PRESSURE,
    NO_PROGRESS,
    NODE_FAULT,
    REQUEST_FAULT,
    AttemptEvent,
    AttemptRun,
    Complete,
    Lost,
    Rejected,
    Suspected,
    Worked,
)
from ryzanstein.router.connection import PROTOCOL
from ryzanstein.router.generation_state import Generation
from ryzanstein.router.hedge_budget import HedgeBudget
from ryzanstein.router.links import Links
from ryzanstein.router.patience import Patience
from ryzanstein.router.telemetry import Telemetry

log = structlog.get_logger(__name__)

# While no node can take a generation it looks again this often, besides at every change of a node: a breaker that
# becomes half-open is no event.
_LOOK_AGAIN_S = 0.25

# Attempts are numbered from epoch * 2**16 on: room for 65,536 of each router, and for 65,536 routers, in the wire's uint32.
_EPOCH_SHIFT = 16


@dataclass(frozen=True, slots=True)
class RunnerPolicy:
    """`failover_wait_s`: how long a generation waits for a node before it fails with NO_NODES. `max_fruitless_attempts`:
    how many attempts in a row may fail without a new token, so that a request which kills nodes kills few. `patience`: how
    long an attempt may bring nothing on a node that works for others."""

    failover_wait_s: float = 15.0
    max_fruitless_attempts: int = 5
    patience: Patience = field(default_factory=Patience)


@dataclass(slots=True)
class _Reroute:
    """Why an attempt was started after the first one, and how long that took."""

    cause: str
    from_node: str
    detected_at: float
    took_s: float = 0.0


class Runner:
    """Runs one generation. `run` it once, as a task; cancelling it cancels the generation on its nodes."""

    def __init__(
        self, generation: Generation, links: Links, policy: RunnerPolicy, hedges: HedgeBudget, telemetry: Telemetry
    ) -> None:
        self._generation = generation
        self._links = links
        self._policy = policy
        self._hedges = hedges
        self._racing = False
        self._telemetry = telemetry
        self._wish = links.wish(generation.request)
        self._events: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        self._runs: dict[AttemptRun, _Reroute | None] = {}
        self._excluded: set[str] = set()
        self._refused_by: set[str] = set()
        # Higher than every attempt of the routers that had the generation before.
        self._next_attempt = generation.epoch << _EPOCH_SHIFT
        self._looking: asyncio.TimerHandle | None = None
        self._fruitless = 0
        self._stuck_since = time.monotonic()

    async def run(self) -> None:
        """Returns when the log is complete. Raises the client's error, or UNAVAILABLE when no node finished it."""
        if self._generation.log.complete:
            return
        self._look()
        try:
            await self._place(None)
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
            self._end_race()

    def _end_race(self) -> None:
        if self._racing:
            self._racing = False
            self._hedges.give()

    def _look(self) -> None:
        """For attempts that a node which works for others has forgotten. Looks again when the first could be that."""
        patience, now = self._policy.patience, time.monotonic()
        left_s = {run: patience.left_s(run.quiet, now) for run in self._runs}
        for run in [run for run, left in left_s.items() if left <= 0]:
            run.alarm()
        again_s = min((left for left in left_s.values() if left > 0), default=patience.accept_s)
        self._looking = asyncio.get_running_loop().call_later(min(again_s, patience.accept_s), self._look)

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
                self._breaker_worked(run.node_id)
                raise error
            case Complete(run):
                run.release()
                self._runs.pop(run)

    def _on_worked(self, run: AttemptRun) -> None:
        self._breaker_worked(run.node_id)
        self._excluded.clear()
        self._fruitless = 0
        self._stuck_since = time.monotonic()
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
        if reroute is None or loser.attempt > winner.attempt:
            self._telemetry.hedges.labels("false_alarm").inc()
            return
        self._telemetry.hedges.labels("won").inc()
        if (breaker := self._links.breaker(loser.node_id)) is not None:
            # A node that works for others may only be slow with this one: a few such in a row open its breaker.
            (breaker.fault if reroute.cause == NO_PROGRESS else breaker.open)()
        self._report(winner, reroute)

    async def _on_lost(self, lost: Lost) -> None:
        reroute = self._runs.pop(lost.run)
        self._blame(lost)
        if not self._runs:
            self._fruitless += 1
            if lost.cause == NO_PROGRESS:
                self._stuck_since = lost.at  # until now it was thought to be in good hands
            await self._place(lost)
            return
        (left,) = self._runs
        remaining = self._runs[left]
        if remaining is not None and left.attempt > lost.run.attempt:
            self._telemetry.hedges.labels("took_over").inc()
            self._report(left, remaining)
        elif reroute is not None:
            self._telemetry.hedges.labels("lost").inc()

    def _blame(self, lost: Lost) -> None:
        """Links blame a node for the end of its link themselves, once and not for each generation."""
        breaker = self._links.breaker(lost.run.node_id)
        if breaker is None:
            return
        if lost.cause in (NODE_FAULT, NO_PROGRESS):
            breaker.fault()
        elif lost.cause == PROTOCOL:
            breaker.open()
        elif lost.cause in (BACK_PRESSURE, REQUEST_FAULT):
            breaker.worked()

    def _breaker_worked(self, node_id: str) -> None:
        if (breaker := self._links.breaker(node_id)) is not None:
            breaker.worked()

    def _candidates(self, *excluded: str) -> list[str]:
        return self._links.candidates(self._generation.request.model, self._wish, {*excluded, *self._excluded})

    async def _place(self, lost: Lost | None) -> None:
        """Starts the next attempt, waiting for a node if need be. Raises when the generation must be given up."""
        if lost is not None:
            self._excluded.add(lost.run.node_id)
            self._require_blameless(lost)
            if self._fruitless >= self._policy.max_fruitless_attempts:
                raise self._give_up(lost)
        while not (nodes := self._candidates()):
            if (
                lost is not None
                and lost.error is not None
                and lost.cause == BACK_PRESSURE
                and not self._generation.log.num_tokens
            ):
                raise lost.error
            left_s = self._stuck_since + self._policy.failover_wait_s - time.monotonic()
            if left_s <= 0:
                raise self._give_up(lost)
            await self._links.changed(min(left_s, _LOOK_AGAIN_S))
            self._excluded.clear()
        self._start(nodes[0], None if lost is None else _Reroute(lost.cause, lost.run.node_id, lost.at))

    def _require_blameless(self, lost: Lost) -> None:
        """Two nodes that are well and cannot run a request agree: it is the request. Raises the error of the second."""
        if lost.cause == REQUEST_FAULT and lost.error is not None:
            self._refused_by.add(lost.run.node_id)
            if len(self._refused_by) > 1 or not self._candidates():
                raise lost.error

    def _give_up(self, lost: Lost | None) -> errors.RyzansteinError:
        cause = "no_nodes" if lost is None else lost.cause
        self._telemetry.failed_over_in_vain.labels(cause).inc()
        if lost is not None and lost.error is not None:
            return lost.error
        return errors.no_nodes(self._generation.request.model, f"{self._fruitless} attempts failed ({cause})")

    def _hedge(self, suspicion: Suspected) -> None:
        """A backup must itself be on time: in a cluster that is slow as a whole, or after a pause of this router, one
        backup more would only be more work. The node is not told to be suspect twice, so this looks again by itself."""
        run = suspicion.run
        if len(self._runs) > 1:
            return
        again = partial(self._events.put_nowait, suspicion)
        nodes = [node_id for node_id in self._candidates(run.node_id) if self._links.punctual(node_id)]
        if not nodes:
            self._hedges.wait_for_node(run, partial(self._wants_backup, run), again)
        elif not self._hedges.take():
            self._hedges.wait(run, partial(self._wants_backup, run), again)
        else:
            self._racing = True
            self._telemetry.hedges.labels("started").inc()
            run.race()
            self._start(nodes[0], _Reroute(suspicion.cause, run.node_id, suspicion.at), hedge=True)

    def _wants_backup(self, run: AttemptRun) -> bool:
        return run in self._runs and run.suspect

    def _start(self, node_id: str, reroute: _Reroute | None, *, hedge: bool = False) -> None:
        generation = self._generation
        number = self._next_attempt
        self._next_attempt += 1
        run = AttemptRun(generation, number, node_id, self._telemetry, self._events.put_nowait)
        if reroute is not None:
            run.on_submitted = partial(self._submitted, run, reroute, hedge)
        self._runs[run] = reroute
        generation.log.admit(number)
        let_in = generation.started is not None
        attempt = Attempt(generation.generation_id, number, generation.request, generation.log.progress, let_in)
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
