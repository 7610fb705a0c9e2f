"""The life of a generation: it runs, is paused without readers, resumes, is stopped, and ends.

Whatever happens, its turn is stored once or left out, its claim on the session is given back, and
its end is recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum

import structlog
from structlog.contextvars import bind_contextvars

from ryzanstein import clock, errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.observe.tracing import traceparent
from ryzanstein.router.core.admission import Admission, Place
from ryzanstein.router.core.cut_off import CutOffs
from ryzanstein.router.core.parts import CoreParts
from ryzanstein.router.core.peers import moved
from ryzanstein.router.failover.hedges import HedgeBudget
from ryzanstein.router.failover.runner import Runner
from ryzanstein.router.generations.generation import Generation, paused
from ryzanstein.router.generations.idempotency import IdempotencyKeys
from ryzanstein.router.generations.retained import ReadingWindow, RetainedGenerations
from ryzanstein.router.sessions.turn import Turn

log = structlog.get_logger(__name__)

Life = Coroutine[None, None, RyzansteinError | None]
# The longest that a new turn waits for the unread generation of its session to end.
_INTERRUPT_WAIT_S = 2.0
_REVOKED = "revoked"


class _Stop(IntEnum):
    """Why a generation's task is cancelled. Of several reasons the highest applies."""

    PAUSED = 1
    OVERDUE = 2
    UNREAD = 3
    CANCELLED = 4
    REFUSED = 5
    MOVED = 6


@dataclass(slots=True)
class _Run:
    """A run of a generation: its task, the turn that it stores, what stops it at its deadline, and why it is stopped.

    `refusal` is the error of one that is stopped because its key has ended.
    """

    task: asyncio.Task[RyzansteinError | None]
    turn: Turn | None
    deadline: asyncio.TimerHandle
    stop: _Stop | None = None
    refusal: RyzansteinError | None = None


class Lifecycle:
    """The generations of a router, from their launch until they are forgotten.

    `retained` holds all of them by id.
    """

    def __init__(self, parts: CoreParts, admission: Admission, keys: IdempotencyKeys) -> None:
        policy, telemetry = parts.policy, parts.telemetry
        self._links = parts.links
        self._turns = parts.turns
        self._policy = policy
        self._telemetry = telemetry
        self._tracing = parts.tracing
        self._recorder = parts.recorder
        self._admission = admission
        self._keys = keys
        self.retained = RetainedGenerations(
            ReadingWindow(policy.unread_grace_s, policy.reattach_window_s, policy.max_retained_tokens),
            self._pause,
            self._abandon,
            self._forgotten,
            telemetry,
            awake=parts.links.awake,
        )
        self._running: dict[Generation, _Run] = {}
        self.retained.measures.watch(self._running)
        self._paused: dict[Generation, Turn | None] = {}
        """The turns of paused generations, which keep their claims."""
        self._cut_offs = CutOffs(parts.recorder, telemetry.background, self._cut_off)
        self._hedges = HedgeBudget(policy.hedges, self._running.__len__, telemetry)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def unfinished(self) -> list[Generation]:
        """Returns the generations that run, and those that are paused."""
        return [*self._running, *self._paused]

    def launch(self, generation: Generation, turn: Turn | None, place: Place) -> None:
        """Runs a generation in the background. It owns the turn and the place from then on."""
        self._run(generation, turn, place, self._live(generation, turn))

    def keep_ended(self, generation: Generation, turn: Turn | None) -> None:
        """Keeps an ended generation of another router readable.

        A paused one keeps its turn's claim.
        """
        if generation.paused:
            self._paused[generation] = turn
        # Its router may have died before that was counted.
        generation.meter.settle(generation.log.num_tokens)
        self.retained.ended(generation)
        if not generation.paused and (generation.error is None or not may_go_on(generation.error)):
            generation.shrink()

    def resume(self, generation: Generation) -> None:
        """Runs a generation again from where it ended, until its deadline.

        Raises QUEUE_FULL when it cannot run now. Its re-attach window starts again in either case.
        """
        generation.last_read_at = time.monotonic()
        self.retained.readers_changed(generation)
        place = self._place_again(generation)
        (self._telemetry.unread.unpaused if generation.paused else self._telemetry.resumed).inc()
        turn = self._paused.pop(generation, None)
        self._unsettle(generation)
        # A paused generation still has the claim on its session.
        life = self._live(generation, turn) if turn is not None else self._live_again(generation)
        self._run(generation, turn, place, life)

    async def interrupt(self, generation: Generation) -> bool:
        """Ends a generation without readers, so that its session can take a new turn.

        Returns True when its claim is released, or when it has not ended in time. Returns False
        when it has readers or runs detached. Cancelling the call does not stop the generation from
        ending.
        """
        if not self._may_interrupt(generation):
            return False
        if not generation.settled and generation in self._running and not generation.log.complete:
            self._stop(generation, _Stop.UNREAD)
            self._telemetry.unread.interrupted.inc()
        elif generation in self._paused:
            self._end_paused(generation, keep=self._keeps)
            self._telemetry.unread.interrupted.inc()
        with suppress(TimeoutError):
            async with asyncio.timeout(_INTERRUPT_WAIT_S):
                if (run := self._running.get(generation)) is not None:
                    await asyncio.wait({run.task})
                await self._cut_offs.wait(generation)
                await self._turns.claimed.released(generation.request.session_id)
        return True

    def cancel(self, generation: Generation) -> None:
        """Cancels a generation. Raises NOT_FOUND when it does not run."""
        if generation in self._paused:
            self._end_paused(generation, keep=False)
        elif generation.log.complete or generation not in self._running:
            raise errors.not_found("generation", generation.generation_id)
        self.stop(generation)

    def stop(self, generation: Generation) -> None:
        """Cancels a generation if it runs."""
        self._stop(generation, _Stop.CANCELLED)

    def end_refused(self, refused: Callable[[GenerationRequest], RyzansteinError | None]) -> int:
        """Ends the generations that `refused` returns an error for, with that error. Returns how many.

        Their turns are not stored.
        """
        ended = 0
        for generation in self.unfinished:
            if generation.request.key_id and (error := refused(generation.request)) is not None:
                self._refuse(generation, error)
                ended += 1
        return ended

    def _refuse(self, generation: Generation, error: RyzansteinError) -> None:
        if generation in self._paused:
            turn = self._paused.pop(generation)
            self._unsettle(generation)
            if turn is not None:
                turn.release()
            self._conclude(generation, error, _REVOKED)
        elif (run := self._running.get(generation)) is not None and not generation.log.complete:
            run.refusal = error
            self._stop(generation, _Stop.REFUSED)

    def moved(self, generation: Generation) -> None:
        """Stops a generation that another router has taken over.

        Its readers here get GENERATION_MOVED, and this router does not store its turn.
        """
        if generation in self._paused:
            turn = self._paused.pop(generation)
            self._unsettle(generation)
            if turn is not None:
                turn.release()
            self._conclude(generation, moved(generation.generation_id), "moved")
        elif generation.settled:
            self._keys.passed_on(generation.generation_id)
            self.retained.drop(generation)
        else:
            self._stop(generation, _Stop.MOVED)
            self._cut_offs.moved(generation)

    async def close(self) -> None:
        """Cancels what runs, and waits for turns that are being stored."""
        tasks = [run.task for run in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._cut_offs.close()
        for turn in self._paused.values():
            if turn is not None:
                turn.release()
        self.retained.close()

    def _may_interrupt(self, generation: Generation) -> bool:
        run = self._running.get(generation)
        ending = generation.log.complete or (run is not None and (run.stop or _Stop.PAUSED) > _Stop.PAUSED)
        return ending or generation in self._paused or generation.unread

    def _unsettle(self, generation: Generation) -> None:
        generation.resume()
        generation.meter.resume()
        self.retained.resumed(generation)
        self._recorder.resumed(generation)

    def _place_again(self, generation: Generation) -> Place:
        """Returns a place for a generation that runs again, as for a new request.

        Its tenant's share applies, and so does the bound on waiting generations when no node has
        accepted it yet.
        """
        request = generation.request
        place = self._admission.enter(request.tenant)
        try:
            if generation.started is None:
                place.wait_for(request.model, self.retained.waiting(request.model))
        except BaseException:
            place.leave()
            raise
        place.launched()
        return place

    def _run(self, generation: Generation, turn: Turn | None, place: Place, life: Life) -> None:
        request = generation.request
        self.retained.measures.began(generation)
        span = self._tracing.start("generation", request.traceparent, {"gen_ai.request.model": request.model})
        if (context := traceparent(span, request.traceparent)) != request.traceparent:
            generation.request = replace(request, traceparent=context)
        task = self._telemetry.background.once("generation", life)
        left_s = (request.deadline or 0.0) - clock.unix_s()
        deadline = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._overdue, generation)
        self._running[generation] = _Run(task, turn, deadline)

        def ended(task: asyncio.Task[RyzansteinError | None]) -> None:
            place.leave()
            self._wind_up(generation)
            tokens = generation.log.num_tokens
            ids = {"ryzanstein.generation_id": generation.generation_id, "ryzanstein.request_id": request.request_id}
            span.set_attributes({**ids, "gen_ai.usage.output_tokens": tokens})
            span.end()

        task.add_done_callback(ended)

    async def _live(self, generation: Generation, turn: Turn | None) -> RyzansteinError | None:
        """Runs the generation to its end. Returns the error that it failed with, or None."""
        request = generation.request
        bind_contextvars(request_id=request.request_id, generation_id=generation.generation_id)  # of this task
        try:
            await self._runner(generation).run()
        except RyzansteinError as error:
            return error
        except Exception:
            log.exception("generation failed")
            return errors.internal(f"internal error, generation {generation.generation_id}")
        if turn is not None:
            # After a long pause, this is the latest point at which the router learns that
            # another router took over.
            await self._recorder.flushed(generation)
            await _commit(generation, turn)
        return None

    def _runner(self, generation: Generation) -> Runner:
        policy, telemetry, tracing = self._policy.runner, self._telemetry, self._tracing
        return Runner(generation, self._links, policy, self._hedges, telemetry=telemetry, tracing=tracing)

    async def _live_again(self, generation: Generation) -> RyzansteinError | None:
        """Runs a generation again with a new claim on its session.

        Returns SESSION_BUSY when another generation has claimed the session meanwhile.
        """
        request, turn = generation.request, None
        if clock.unix_s() >= (request.deadline or 0.0):
            return errors.deadline_exceeded()
        try:
            if generation.new_messages:
                turn = await self._turns.again(request.session_id, generation.generation_id, generation.new_messages)
                self._running[generation].turn = turn
            return await self._live(generation, turn)
        except RyzansteinError as error:
            return error
        except Exception:
            log.exception("generation not resumed", generation_id=generation.generation_id)
            return errors.internal(f"internal error, generation {generation.generation_id}")

    def _wind_up(self, generation: Generation) -> None:
        """Finishes a generation however it ended, even if cancelled before its first step."""
        run = self._running.pop(generation)
        run.deadline.cancel()
        task, turn, why = run.task, run.turn, run.stop
        if task.cancelled() and why is _Stop.PAUSED:
            self._has_paused(generation, turn)
            return
        if task.cancelled() and why is _Stop.UNREAD:
            self._cut_offs.begin(generation, turn, keep=self._keeps)
            return
        if turn is not None:
            turn.release()
        error, outcome = self._outcome(generation, run)
        if outcome == "cancelled":
            for choice in generation.log.cancel():
                generation.end_choice(choice)
        self._conclude(generation, error, outcome)

    def _conclude(self, generation: Generation, error: RyzansteinError | None, outcome: str) -> None:
        if outcome == "moved":
            self._keys.passed_on(generation.generation_id)
        elif not may_go_on(error):
            # Before the end is visible: a client that retries at once must find the key free.
            self._keys.free(generation.generation_id)
        # And it must find free what the generation held of its tenant's limits.
        if outcome == "moved":
            generation.meter.leave()
        else:
            generation.meter.settle(generation.log.num_tokens)
        generation.settle(error)
        self.retained.ended(generation)
        if outcome == "moved" or generation.abandoned:
            self.retained.drop(generation)
        else:
            self._recorder.ended(generation)
            if error is None or not may_go_on(error):
                generation.shrink()
        self.retained.measures.ended(generation, outcome)

    def _has_paused(self, generation: Generation, turn: Turn | None) -> None:
        """Settles a paused generation.

        It keeps its claim, so that a new turn of its session finds it.
        """
        self._paused[generation] = turn
        generation.meter.settle(generation.log.num_tokens)
        generation.settle(paused(generation.generation_id))
        self._recorder.ended(generation)
        self._telemetry.unread.paused.inc()
        self.retained.ended(generation)
        # A reader may come at the same moment.
        if generation.num_readers and generation in self._paused:
            with suppress(RyzansteinError):
                self.resume(generation)

    def _pause(self, generation: Generation) -> None:
        if not generation.log.complete:
            self._stop(generation, _Stop.PAUSED)

    def _overdue(self, generation: Generation) -> None:
        if not generation.log.complete:
            self._stop(generation, _Stop.OVERDUE)

    def _abandon(self, generation: Generation) -> None:
        """Ends a generation that no reader came back to. It is dropped when it has ended."""
        generation.abandoned = True
        if generation in self._paused:
            self._end_paused(generation, keep=self._keeps)
        elif not generation.log.complete:
            self._stop(generation, _Stop.UNREAD)

    def _end_paused(self, generation: Generation, *, keep: bool) -> None:
        turn = self._paused.pop(generation)
        self._unsettle(generation)
        self._cut_offs.begin(generation, turn, keep=keep)

    def _cut_off(self, generation: Generation, has_moved: bool) -> None:
        if has_moved:
            self._conclude(generation, moved(generation.generation_id), "moved")
        else:
            self._conclude(generation, None, "cancelled")

    @property
    def _keeps(self) -> bool:
        return self._policy.unread_turns == "keep"

    def _outcome(self, generation: Generation, run: _Run) -> tuple[RyzansteinError | None, str]:
        task = run.task
        if run.stop is _Stop.MOVED:
            return moved(generation.generation_id), "moved"
        if run.stop is _Stop.REFUSED:
            return run.refusal, _REVOKED
        if run.stop is _Stop.OVERDUE:
            overdue = errors.deadline_exceeded()
            return overdue, overdue.code.name.lower()
        if task.cancelled():
            return None, "cancelled"
        error = errors.internal(f"internal error, generation {generation.generation_id}") if task.exception() else task.result()
        return error, "complete" if error is None else error.code.name.lower()

    def _forgotten(self, generation: Generation) -> None:
        self._keys.free(generation.generation_id)
        self._recorder.forgotten(generation)
        generation.held_prompt.release()

    def _stop(self, generation: Generation, why: _Stop) -> None:
        run = self._running.get(generation)
        if run is not None and why > (run.stop or 0):
            run.stop = why
            # The last tokens may arrive before the task is cancelled. A generation that is stopped
            # half-way must not become complete then.
            generation.log.fence_all()
            run.task.cancel()


def may_go_on(error: RyzansteinError | None) -> bool:
    """Returns True when a generation that ended with `error` keeps its key.

    It can then still be answered, or resumed, under the key. Any other generation under the key
    would run beside it and be stored too.
    """
    return error is None or error.retry_after_s is not None


async def _commit(generation: Generation, turn: Turn) -> None:
    """Stores the first choice in the session, unless it was cancelled."""
    answer = generation.log.choices[0]
    if answer.reason not in (None, FinishReason.CANCELLED):
        node_id = answer.nodes[-1][1] if answer.nodes else ""
        message = await generation.message(len(answer.tokens))
        await turn.commit(message, generation.request.public_model, node_id)
