"""The router's core: what both faces call. Admits a request, gives it its place in a session, runs it, keeps it readable."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import structlog
from structlog.contextvars import bound_contextvars

from ryzanstein import clock, errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import ChatPrompt, FinishReason, GenerationEvent, GenerationRequest, Prompt
from ryzanstein.router.admission import Admission, Limits
from ryzanstein.router.core import ServedModel
from ryzanstein.router.generation_state import Generation
from ryzanstein.router.generations import Generations
from ryzanstein.router.hedge_budget import HedgeBudget, HedgePolicy
from ryzanstein.router.journal.encoding import decode_request, has_settled, restore
from ryzanstein.router.journal.journal import Record
from ryzanstein.router.journal.peers import moved
from ryzanstein.router.links import Links
from ryzanstein.router.placing import RunnerPolicy
from ryzanstein.router.recording import Recorder, Unrecorded
from ryzanstein.router.runner import Runner
from ryzanstein.router.sessions.turn import Turn, Turns
from ryzanstein.router.telemetry import Telemetry
from ryzanstein.router.token_count import count_prompt_tokens
from ryzanstein.tracing import Tracing, traceparent

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CorePolicy:
    """`deadline_s` is given to requests that bring none; `reattach_window_s` and `max_retained_tokens` bound what can be
    read without a reader having stayed."""

    runner: RunnerPolicy
    limits: Limits
    deadline_s: float = 600.0
    reattach_window_s: float = 30.0
    max_retained_tokens: int = 1_000_000
    hedges: HedgePolicy = field(default_factory=HedgePolicy)


class RouterCore:
    """Implements `ryzanstein.router.core.Core` for this router's own generations. `close` cancels what still runs, here: with
    a recorder that keeps it another router may go on."""

    def __init__(
        self,
        links: Links,
        turns: Turns,
        policy: CorePolicy,
        telemetry: Telemetry,
        tracing: Tracing,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        self._links = links
        self._turns = turns
        self._policy = policy
        self._telemetry = telemetry
        self._tracing = tracing
        self._admission = Admission(policy.limits, telemetry)
        self._recorder = recorder if recorder is not None else Unrecorded()
        self._generations = Generations(
            policy.reattach_window_s, policy.max_retained_tokens, self._stop, self._recorder.forgotten, telemetry
        )
        self._moved: set[Generation] = set()
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
        request, turn = await self._turns.open(request, generation_id)
        try:
            request = self._completed(request)
            self._admission.check_room(len(self._running), self._generations.waiting(request.model), request.tenant)
            if turn is not None:
                await turn.ensure(request.model)
            generation = self._launch(generation_id, request, turn, resumable)
        except BaseException:
            if turn is not None:
                turn.release()
            raise
        # While the node begins: whoever knows the id must find the generation at another router.
        try:
            await self._recorder.flushed(generation)
        except asyncio.CancelledError:
            self._stop(generation)
            raise
        return generation_id

    async def follow(
        self, generation_id: str, from_index: Mapping[int, int] | None = None, owner_id: str = ""
    ) -> AsyncGenerator[GenerationEvent, None]:
        """See `Core.follow`."""
        generation = self._generations.get(generation_id)
        if generation.started is not None:
            self._telemetry.reattached.inc()
        async with aclosing(generation.follow(from_index or {})) as events:
            async for event in events:
                yield event

    async def cancel(self, generation_id: str, owner_id: str = "") -> None:
        """See `Core.cancel`."""
        generation = self._generations.get(generation_id)
        if generation.log.complete or generation not in self._running:
            raise errors.not_found("generation", generation_id)
        self._stop(generation)

    def find(self, generation_id: str) -> Generation | None:
        """A generation that can be read here."""
        return self._generations.find(generation_id)

    def check_room(self) -> None:
        """QUEUE_FULL when this router runs as many generations as it may."""
        self._admission.check_running(len(self._running))

    async def adopt(self, generation_id: str, record: Record) -> Generation:
        """Goes on with a generation that another router had, where the record ends."""
        request, new_messages = decode_request(record.request)
        settled = has_settled(record.batches)
        turn = None
        if request.session_id and isinstance(request.prompt, ChatPrompt) and not settled:
            said = request.prompt.messages[-new_messages:]
            turn = await self._turns.resume(request.session_id, generation_id, said)
        generation = Generation(generation_id, request, self._generations, record.epoch)
        self._generations.add(generation)
        settled = restore(generation, record.batches)
        self._recorder.added(generation, new_messages)
        if settled:
            self._generations.ended(generation)
        else:
            self._run(generation, turn)
        return generation

    def moved(self, generation: Generation) -> None:
        """Another router goes on with it. Its readers here are told so; its turn is not stored by this router."""
        if generation in self._running:
            self._moved.add(generation)
            self._stop(generation)

    async def count_tokens(self, model: str, prompt: Prompt) -> int:
        """Asks the least loaded node. NOT_FOUND for a model that nobody serves, otherwise the node's own error."""
        self._admission.check_size(prompt)
        return await count_prompt_tokens(self._links, self._model(model), prompt)

    async def close(self) -> None:
        await self._recorder.close()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._generations.close()

    def _completed(self, request: GenerationRequest) -> GenerationRequest:
        """With model, seed and deadline, which a client may leave out."""
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        return replace(
            request,
            model=self._model(request.model),
            sampling=replace(request.sampling, seed=seed),
            deadline=request.deadline if request.deadline is not None else clock.unix_s() + self._policy.deadline_s,
        )

    def _model(self, name: str) -> str:
        """NO_NODES when no node is known at all; otherwise an unknown name is NOT_FOUND."""
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

    def _launch(self, generation_id: str, request: GenerationRequest, turn: Turn | None, resumable: bool) -> Generation:
        generation = Generation(generation_id, request, self._generations)
        self._generations.add(generation)
        if resumable:
            self._recorder.added(generation, 0 if turn is None else len(turn.said))
        self._run(generation, turn)
        return generation

    def _run(self, generation: Generation, turn: Turn | None) -> None:
        request = generation.request
        span = self._tracing.start("generation", request.traceparent, **{"gen_ai.request.model": request.model})
        generation.request = replace(request, traceparent=traceparent(span, request.traceparent))
        task = asyncio.get_running_loop().create_task(self._live(generation, turn))
        self._running[generation] = task
        self._admission.enter(request.tenant)

        def ended(task: asyncio.Task[RyzansteinError | None]) -> None:
            self._wind_up(generation, turn, task)
            tokens = generation.log.num_tokens
            span.set_attributes({"ryzanstein.generation_id": generation.generation_id, "ryzanstein.tokens": tokens})
            span.end()

        task.add_done_callback(ended)

    async def _live(self, generation: Generation, turn: Turn | None) -> RyzansteinError | None:
        """Runs the generation to its end; returns what it failed with."""
        request = generation.request
        with bound_contextvars(request_id=request.request_id, generation_id=generation.generation_id):
            try:
                async with asyncio.timeout((request.deadline or 0.0) - clock.unix_s()):
                    await Runner(generation, self._links, self._policy.runner, self._hedges, self._telemetry).run()
            except TimeoutError:
                return errors.deadline_exceeded()
            except RyzansteinError as error:
                return error
            except Exception:
                log.exception("generation failed")
                return errors.internal(f"internal error, generation {generation.generation_id}")
            if turn is not None:
                # A router that was stopped for a while learns here, at the latest, that another one has gone on.
                await self._recorder.flushed(generation)
                await _commit(generation, turn)
            return None

    def _wind_up(self, generation: Generation, turn: Turn | None, task: asyncio.Task[RyzansteinError | None]) -> None:
        """Runs however the generation ended, also when it was cancelled before its first step."""
        del self._running[generation]
        self._admission.leave(generation.request.tenant)
        if turn is not None:
            turn.release()
        error, outcome = self._outcome(generation, task)
        if outcome == "cancelled":
            for choice in generation.log.cancel():
                generation.end_choice(choice)
        generation.settle(error)
        self._generations.ended(generation)
        if outcome == "moved":
            self._generations.drop(generation)
        else:
            self._recorder.ended(generation)
        self._measure(generation, outcome)

    def _outcome(
        self, generation: Generation, task: asyncio.Task[RyzansteinError | None]
    ) -> tuple[RyzansteinError | None, str]:
        if generation in self._moved:
            self._moved.discard(generation)
            return moved(generation.generation_id), "moved"
        if task.cancelled():
            return None, "cancelled"
        error = task.result()
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

    def _stop(self, generation: Generation) -> None:
        if (task := self._running.get(generation)) is not None:
            task.cancel()


async def _commit(generation: Generation, turn: Turn) -> None:
    """The session keeps the first answer; one that was cancelled is no answer."""
    answer = generation.log.choices[0]
    if answer.reason in (FinishReason.STOP, FinishReason.LENGTH):
        node_id = answer.nodes[-1][1] if answer.nodes else ""
        await turn.commit("".join(token.text for token in answer.tokens), generation.request.model, node_id)
