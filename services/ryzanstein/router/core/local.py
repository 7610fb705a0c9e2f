"""The router's core, which both faces call.

It admits a request, gives it its turn in a session, runs it, and keeps it readable.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

import structlog
from structlog.contextvars import bound_contextvars

from ryzanstein import clock, errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import ChatPrompt, FinishReason, GenerationEvent, GenerationRequest, Message, Prompt
from ryzanstein.router.core.admission import Admission, Limits, Place
from ryzanstein.router.core.cut_off import CutOffs
from ryzanstein.router.core.peers import moved
from ryzanstein.router.failover.hedges import HedgeBudget, HedgePolicy
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.failover.runner import Runner
from ryzanstein.router.generations.cursor import check_from_index, follow
from ryzanstein.router.generations.generation import Generation, paused
from ryzanstein.router.generations.idempotency import IdempotencyKeys, SharedKeys, UnsharedKeys
from ryzanstein.router.generations.recorder import Recorder, Unrecorded
from ryzanstein.router.generations.retained import ReadingWindow, RetainedGenerations, UnreadTurns
from ryzanstein.router.journal.encoding import decode_request, has_paused, has_settled, restore
from ryzanstein.router.journal.journal import JournalRecord
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.nodes.served import ServedModel
from ryzanstein.router.nodes.token_count import count_prompt_tokens
from ryzanstein.router.sessions.claims import SessionBusyError
from ryzanstein.router.sessions.turn import Turn, Turns
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.tracing import Tracing, traceparent

log = structlog.get_logger(__name__)

Life = Coroutine[None, None, RyzansteinError | None]
# The longest that a new turn waits for the unread generation of its session to end.
_INTERRUPT_WAIT_S = 2.0


class OtherRouters(Protocol):
    """The other routers."""

    async def interrupt(self, owner_id: str, generation_id: str) -> bool:
        """See `LocalCore.interrupt`. Also returns False when that router does not answer."""
        ...


class _Stop(IntEnum):
    """Why a generation's task is cancelled. Of several reasons the highest applies."""

    PAUSED = 1
    UNREAD = 2
    CANCELLED = 3
    MOVED = 4


@dataclass(frozen=True, slots=True)
class CorePolicy:
    """The limits and times of a core.

    `deadline_s` applies to requests without a deadline. `reattach_window_s` and
    `max_retained_tokens` bound what can be read without a reader having stayed. Without a reader a
    generation runs for `unread_grace_s`. `unread_turns` says what a session keeps of a generation
    that is ended because it has no reader.
    """

    runner: RunnerPolicy
    limits: Limits
    deadline_s: float = 600.0
    reattach_window_s: float = 30.0
    unread_grace_s: float = 5.0
    unread_turns: UnreadTurns = "keep"
    max_retained_tokens: int = 1_000_000
    hedges: HedgePolicy = field(default_factory=HedgePolicy)


class LocalCore:
    """A `Core` for this router's own generations.

    `close` cancels the generations that still run here. If the recorder persists them, another
    router may continue them.
    """

    def __init__(
        self,
        links: Roster,
        turns: Turns,
        policy: CorePolicy,
        telemetry: RouterTelemetry,
        tracing: Tracing,
        *,
        recorder: Recorder | None = None,
        keys: SharedKeys | None = None,
        others: OtherRouters | None = None,
    ) -> None:
        self._links = links
        self._turns = turns
        self._policy = policy
        self._telemetry = telemetry
        self._tracing = tracing
        self._admission = Admission(policy.limits, telemetry)
        self._recorder = recorder if recorder is not None else Unrecorded()
        self._keys = IdempotencyKeys(keys if keys is not None else UnsharedKeys(), telemetry)
        self._others = others
        self._generations = RetainedGenerations(
            ReadingWindow(policy.unread_grace_s, policy.reattach_window_s, policy.max_retained_tokens),
            self._pause,
            self._abandon,
            self._forgotten,
            telemetry,
            awake=links.awake,
        )
        self._stops: dict[Generation, _Stop] = {}
        self._paused: dict[Generation, Turn | None] = {}
        self._claimed_again: dict[Generation, Turn] = {}
        self._cut_offs = CutOffs(self._recorder, telemetry.background, self._cut_off)
        self._running: dict[Generation, asyncio.Task[RyzansteinError | None]] = {}
        self._hedges = HedgeBudget(policy.hedges, self._running.__len__, telemetry)

    @property
    def ready(self) -> bool:
        return bool(self._links.models)

    @property
    def running(self) -> int:
        return len(self._running)

    def models(self) -> list[ServedModel]:
        return self._links.models

    async def submit(self, request: GenerationRequest, *, resumable: bool = True) -> str:
        """See `Core.submit`."""
        request.sampling.validate()
        self._admission.check_size(request.prompt)
        generation_id = uuid.uuid4().hex
        if request.key is None:
            await self._start(generation_id, request, resumable)
            return generation_id
        deadline = self._deadline(request)
        holder_id = await self._keys.claim(request.key, generation_id, deadline - clock.unix_s())
        if holder_id == generation_id:
            await self._start(generation_id, replace(request, deadline=deadline), True)
        return holder_id

    async def _start(self, generation_id: str, request: GenerationRequest, resumable: bool) -> None:
        try:
            place = self._admission.enter(request.tenant)
            try:
                generation = await self._begun(generation_id, request, place, resumable)
            except BaseException:
                place.leave()
                raise
        except BaseException:
            self._keys.free(generation_id)
            raise
        self._keys.begun(generation_id)
        # While the node begins: a client that knows the id must find the generation at another
        # router.
        try:
            await self._recorder.flushed(generation)
        except asyncio.CancelledError:
            if request.key is None and not request.detached:  # no client can come back for it
                self._stop(generation, _Stop.CANCELLED)
            raise

    async def _begun(self, generation_id: str, request: GenerationRequest, place: Place, resumable: bool) -> Generation:
        """Opens the session's turn and launches the generation, which then owns the place."""
        request, turn = await self._opened(request, generation_id)
        try:
            request = self._completed(request)
            place.wait_for(request.model, self._generations.waiting(request.model))
            if turn is not None:
                await turn.ensure(request.model)
            return self._launch(generation_id, request, turn, place, resumable)
        except BaseException:
            if turn is not None:
                turn.release()
            raise

    async def _opened(self, request: GenerationRequest, generation_id: str) -> tuple[GenerationRequest, Turn | None]:
        """Opens the session's turn. Ends an unread generation that still claims the session."""
        try:
            return await self._turns.open(request, generation_id)
        except SessionBusyError as busy:
            if not await self._interrupted(busy):
                self._telemetry.refused.labels("session_busy").inc()
                raise
        return await self._turns.open(request, generation_id)

    async def _interrupted(self, busy: SessionBusyError) -> bool:
        if self._generations.find(busy.generation_id) is not None:
            return await self.interrupt(busy.generation_id)
        return self._others is not None and await self._others.interrupt(busy.owner, busy.generation_id)

    async def interrupt(self, generation_id: str) -> bool:
        """Ends a generation without readers, so that its session can take a new turn.

        Returns True when its claim is released, or when it has not ended in time. Returns False
        when it has readers, runs detached, or is not at this router. Cancelling the call does not
        stop the generation from ending.
        """
        generation = self._generations.find(generation_id)
        if generation is None or not self._may_interrupt(generation):
            return False
        if not generation.settled and generation in self._running and not generation.log.complete:
            self._stop(generation, _Stop.UNREAD)
            self._telemetry.unread.interrupted.inc()
        elif generation in self._paused:
            self._end_paused(generation, keep=self._keeps)
            self._telemetry.unread.interrupted.inc()
        with suppress(TimeoutError):
            async with asyncio.timeout(_INTERRUPT_WAIT_S):
                if (task := self._running.get(generation)) is not None:
                    await asyncio.wait({task})
                await self._cut_offs.wait(generation)
                await self._turns.claimed.released(generation.request.session_id)
        return True

    def _may_interrupt(self, generation: Generation) -> bool:
        ending = generation.log.complete or self._stops.get(generation, _Stop.PAUSED) > _Stop.PAUSED
        return ending or generation in self._paused or generation.unread

    async def follow(
        self, generation_id: str, from_index: Mapping[int, int] | None = None, owner_id: str = "", *, whole: bool = False
    ) -> AsyncGenerator[GenerationEvent, None]:
        """See `Core.follow`."""
        generation = self._generations.get(generation_id)
        # Before it resumes: a reader that is refused must not make it run.
        check_from_index(generation, from_index or {})
        if generation.started is not None:
            self._telemetry.reattached.inc()
        if generation.resumable:
            self._resume(generation)
        async with aclosing(follow(generation, from_index or {}, whole=whole)) as events:
            async for event in events:
                yield event

    async def cancel(self, generation_id: str, owner_id: str = "") -> None:
        """See `Core.cancel`."""
        generation = self._generations.get(generation_id)
        if generation in self._paused:
            self._end_paused(generation, keep=False)
        elif generation.log.complete or generation not in self._running:
            raise errors.not_found("generation", generation_id)
        self._stop(generation, _Stop.CANCELLED)

    async def leave(self, generation_id: str) -> None:
        """See `Core.leave`."""
        if not self._generations.get(generation_id).num_readers:
            await self.cancel(generation_id)

    def find(self, generation_id: str) -> Generation | None:
        """Returns a generation that can be read here, or None."""
        return self._generations.find(generation_id)

    def reserve(self) -> Place:
        """Returns a place for a generation that is to be adopted.

        Raises QUEUE_FULL at the limit of running generations.
        """
        return self._admission.enter_unnamed()

    async def adopt(self, generation_id: str, record: JournalRecord, place: Place) -> Generation:
        """Continues a generation of another router from where its record ends.

        The generation owns the place from then on.
        """
        request, new_messages = decode_request(record.request)
        settled, was_paused = has_settled(record.batches), has_paused(record.batches)
        turn, said = None, _said(request, new_messages)
        if said and (not settled or was_paused):
            turn = await self._turns.resume(request.session_id, generation_id, said)
        generation = Generation(generation_id, request, self._generations, record.epoch)
        # Its readers at the other router were sent its end.
        generation.said, generation.was_read = said, True
        self._generations.add(generation)
        settled = restore(generation, record.batches)
        self._recorder.added(generation, new_messages)
        if request.key is not None and _may_go_on(generation.error):
            self._keys.adopted(request.key, generation_id)
        if settled:
            if generation.paused:
                self._paused[generation] = turn
            self._generations.ended(generation)
            place.leave()
        else:
            place.belongs_to(request.tenant)
            self._run(generation, turn, place, self._live(generation, turn))
        return generation

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
            self._generations.drop(generation)
        else:
            self._stop(generation, _Stop.MOVED)
            self._cut_offs.moved(generation)

    async def count_tokens(self, model: str, prompt: Prompt) -> int:
        """Counts a prompt's tokens at the least loaded node.

        Raises NOT_FOUND for a model that no node serves, otherwise the node's own error.
        """
        self._admission.check_size(prompt)
        return await count_prompt_tokens(self._links, self._model(model), prompt)

    async def drain(self) -> None:
        """Does nothing: no other router knows this core's generations."""

    async def close(self) -> None:
        await self._recorder.close()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._cut_offs.close()
        for turn in self._paused.values():
            if turn is not None:
                turn.release()
        self._generations.close()
        await self._keys.close()

    def _completed(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with a model, seed and deadline, which a client may omit."""
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        return replace(
            request,
            model=self._model(request.model),
            sampling=replace(request.sampling, seed=seed),
            deadline=self._deadline(request),
        )

    def _deadline(self, request: GenerationRequest) -> float:
        return request.deadline if request.deadline is not None else clock.unix_s() + self._policy.deadline_s

    def _model(self, name: str) -> str:
        """Returns the name of the model to use.

        Raises NO_NODES when no node is known at all; otherwise an unknown name is NOT_FOUND.
        """
        known = self._links.known_models
        if name in known:
            return name
        if not known:
            self._telemetry.refused.labels("no_nodes").inc()
            raise errors.no_nodes(name, "no node is linked")
        if name:
            raise errors.not_found("model", name)
        if len(known) > 1:
            raise errors.invalid("model", f"must be given, the cluster serves {', '.join(sorted(known))}"[:256])
        return next(iter(known))

    def _launch(
        self, generation_id: str, request: GenerationRequest, turn: Turn | None, place: Place, resumable: bool
    ) -> Generation:
        generation = Generation(generation_id, request, self._generations)
        self._generations.add(generation)
        place.launched()
        if turn is not None:
            generation.said = turn.said
        if resumable:
            self._recorder.added(generation, len(generation.said))
        self._run(generation, turn, place, self._live(generation, turn))
        return generation

    def _resume(self, generation: Generation) -> None:
        """Runs a generation again from where it ended, until its deadline.

        Raises QUEUE_FULL when it cannot run now. Its re-attach window starts again in either case.
        """
        generation.last_read_at = time.monotonic()
        self._generations.readers_changed(generation)
        place = self._place_again(generation)
        (self._telemetry.unread.unpaused if generation.paused else self._telemetry.resumed).inc()
        turn = self._paused.pop(generation, None)
        self._unsettle(generation)
        # A paused generation still has the claim on its session.
        life = self._live(generation, turn) if turn is not None else self._live_again(generation)
        self._run(generation, turn, place, life)

    def _unsettle(self, generation: Generation) -> None:
        generation.resume()
        self._generations.resumed(generation)
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
                place.wait_for(request.model, self._generations.waiting(request.model))
        except BaseException:
            place.leave()
            raise
        place.launched()
        return place

    def _run(self, generation: Generation, turn: Turn | None, place: Place, life: Life) -> None:
        request = generation.request
        span = self._tracing.start("generation", request.traceparent, **{"gen_ai.request.model": request.model})
        generation.request = replace(request, traceparent=traceparent(span, request.traceparent))
        task = self._telemetry.background.once("generation", life)
        self._running[generation] = task

        def ended(task: asyncio.Task[RyzansteinError | None]) -> None:
            place.leave()
            self._wind_up(generation, turn, task)
            tokens = generation.log.num_tokens
            span.set_attributes({"ryzanstein.generation_id": generation.generation_id, "ryzanstein.tokens": tokens})
            span.end()

        task.add_done_callback(ended)

    async def _live_again(self, generation: Generation) -> RyzansteinError | None:
        """Runs a generation again with a new claim on its session.

        Returns SESSION_BUSY when another generation has claimed the session meanwhile.
        """
        request, turn = generation.request, None
        if clock.unix_s() >= (request.deadline or 0.0):
            return errors.deadline_exceeded()
        try:
            if generation.said:
                turn = await self._turns.again(request.session_id, generation.generation_id, generation.said)
                self._claimed_again[generation] = turn
            return await self._live(generation, turn)
        except RyzansteinError as error:
            return error
        except Exception:
            log.exception("generation not resumed", generation_id=generation.generation_id)
            return errors.internal(f"internal error, generation {generation.generation_id}")

    async def _live(self, generation: Generation, turn: Turn | None) -> RyzansteinError | None:
        """Runs the generation to its end. Returns the error that it failed with, or None."""
        request = generation.request
        with bound_contextvars(request_id=request.request_id, generation_id=generation.generation_id):
            try:
                async with asyncio.timeout((request.deadline or 0.0) - clock.unix_s()):
                    await Runner(generation, self._links, self._policy.runner, self._hedges, self._telemetry).run()
            except TimeoutError:
                # The last token may arrive in the same loop iteration as the deadline.
                if not generation.log.complete:
                    return errors.deadline_exceeded()
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

    def _wind_up(self, generation: Generation, turn: Turn | None, task: asyncio.Task[RyzansteinError | None]) -> None:
        """Finishes a generation however it ended, even if cancelled before its first step."""
        del self._running[generation]
        turn = self._claimed_again.pop(generation, turn)
        why = self._stops.pop(generation, None)
        if task.cancelled() and why is _Stop.PAUSED:
            self._has_paused(generation, turn)
            return
        if task.cancelled() and why is _Stop.UNREAD:
            self._cut_offs.begin(generation, turn, keep=self._keeps)
            return
        if turn is not None:
            turn.release()
        error, outcome = self._outcome(generation, task, why)
        if outcome == "cancelled":
            for choice in generation.log.cancel():
                generation.end_choice(choice)
        self._conclude(generation, error, outcome)

    def _conclude(self, generation: Generation, error: RyzansteinError | None, outcome: str) -> None:
        if outcome == "moved":
            self._keys.passed_on(generation.generation_id)
        elif not _may_go_on(error):
            # Before the end is visible: a client that retries at once must find the key free.
            self._keys.free(generation.generation_id)
        generation.settle(error)
        self._generations.ended(generation)
        if outcome == "moved" or generation.abandoned:
            self._generations.drop(generation)
        else:
            self._recorder.ended(generation)
        self._measure(generation, outcome)

    def _has_paused(self, generation: Generation, turn: Turn | None) -> None:
        """Settles a paused generation.

        It keeps its claim, so that a new turn of its session finds it.
        """
        self._paused[generation] = turn
        generation.settle(paused(generation.generation_id))
        self._recorder.ended(generation)
        self._telemetry.unread.paused.inc()
        self._generations.ended(generation)
        # A reader may come at the same moment.
        if generation.num_readers and generation in self._paused:
            with suppress(RyzansteinError):
                self._resume(generation)

    def _pause(self, generation: Generation) -> None:
        if not generation.log.complete:
            self._stop(generation, _Stop.PAUSED)

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

    def _outcome(
        self, generation: Generation, task: asyncio.Task[RyzansteinError | None], why: _Stop | None
    ) -> tuple[RyzansteinError | None, str]:
        if why is _Stop.MOVED:
            return moved(generation.generation_id), "moved"
        if task.cancelled():
            return None, "cancelled"
        error = errors.internal(f"internal error, generation {generation.generation_id}") if task.exception() else task.result()
        return error, "complete" if error is None else error.code.name.lower()

    def _measure(self, generation: Generation, outcome: str) -> None:
        model, first_at = generation.request.model, generation.first_token_at
        self._telemetry.generations.labels(model, outcome).inc()
        self._telemetry.duration.labels(model).observe(time.monotonic() - generation.submitted_at)
        if first_at is None or generation.epoch:
            return
        self._telemetry.first_token.labels(model).observe(first_at - generation.submitted_at)
        if generation.log.num_tokens > 1:
            mean_s = (generation.last_token_at - first_at) / (generation.log.num_tokens - 1)
            self._telemetry.per_token.labels(model).observe(mean_s)

    def _forgotten(self, generation: Generation) -> None:
        self._keys.free(generation.generation_id)
        self._recorder.forgotten(generation)

    def _stop(self, generation: Generation, why: _Stop) -> None:
        task = self._running.get(generation)
        if task is not None and why > self._stops.get(generation, 0):
            self._stops[generation] = why
            # The last tokens may arrive before the task is cancelled. A generation that is stopped
            # half-way must not become complete then.
            generation.log.fence_all()
            task.cancel()


def _may_go_on(error: RyzansteinError | None) -> bool:
    """Returns True when a generation that ended with `error` keeps its key.

    It can then still be answered, or resumed, under the key. Any other generation under the key
    would run beside it and be stored too.
    """
    return error is None or error.retry_after_s is not None


def _said(request: GenerationRequest, new_messages: int) -> tuple[Message, ...]:
    """Returns the last messages of a request, which form its session's turn."""
    if not request.session_id or not isinstance(request.prompt, ChatPrompt) or not new_messages:
        return ()
    return request.prompt.messages[-new_messages:]


async def _commit(generation: Generation, turn: Turn) -> None:
    """Stores the first choice in the session, unless it was cancelled."""
    answer = generation.log.choices[0]
    if answer.reason not in (None, FinishReason.CANCELLED):
        node_id = answer.nodes[-1][1] if answer.nodes else ""
        await turn.commit("".join(token.text for token in answer.tokens), generation.request.model, node_id)
