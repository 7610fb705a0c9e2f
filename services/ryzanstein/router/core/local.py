"""The router's core, which all faces call.

It admits a request, gives it its turn in a session, runs it, and keeps it readable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ryzanstein import clock, errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Prompt, TokenPrompt, has_middle
from ryzanstein.generation.request import AdapterRef, GenerationRequest
from ryzanstein.generation.tokens import GenerationEvent
from ryzanstein.observe.requests import FoundRequest, RequestStage
from ryzanstein.request_id import random_id, random_seed
from ryzanstein.router.access.limits.hold import Hold
from ryzanstein.router.core.admission import Admission, Arrivals, HeldPrompt, Place, estimated_tokens
from ryzanstein.router.core.any_node import AnyNode, filled
from ryzanstein.router.core.embeddings import Embedder
from ryzanstein.router.core.lifecycle import Lifecycle, may_go_on
from ryzanstein.router.core.parts import CoreParts
from ryzanstein.router.generations.cursor import check_from_index, follow
from ryzanstein.router.generations.generation import Generation, GenerationTimes
from ryzanstein.router.generations.idempotency import IdempotencyKeys, KeyTakenError
from ryzanstein.router.generations.whereabouts import found
from ryzanstein.router.journal.encoding import decode_request, has_paused, has_settled, restore, with_own_deadline
from ryzanstein.router.journal.journal import JournalRecord
from ryzanstein.router.nodes.calls import texts
from ryzanstein.router.nodes.calls.texts import Tokenized, count_prompt_tokens
from ryzanstein.router.nodes.table import ServedModel
from ryzanstein.router.sessions.claims import SessionBusyError
from ryzanstein.router.sessions.turn import Turn


@dataclass(frozen=True, slots=True)
class _Entry:
    """What an admitted request has until its generation is launched: a place, memory for its prompt, its times."""

    place: Place
    held: HeldPrompt
    times: GenerationTimes = field(default_factory=GenerationTimes)


class LocalCore:
    """A `Core` for this router's own generations.

    `close` cancels the generations that still run here. If the recorder persists them, another
    router may continue them.
    """

    def __init__(self, parts: CoreParts) -> None:
        self._links = parts.links
        self._turns = parts.turns
        self._policy = parts.policy
        self._telemetry = parts.telemetry
        self._recorder = parts.recorder
        self._others = parts.others
        self._allowance = parts.allowance
        self._admission = Admission(parts.policy.limits, parts.telemetry)
        self._keys = IdempotencyKeys(parts.keys, parts.telemetry)
        self._lifecycle = Lifecycle(parts, self._admission, self._keys)
        self._generations = self._lifecycle.retained
        self._any_node = AnyNode(parts.links, parts.policy.runner)
        self._embedder = Embedder(parts.links, parts.policy.runner, parts.telemetry)
        self._arrivals = Arrivals()

    @property
    def ready(self) -> bool:
        return bool(self._links.models)

    @property
    def running(self) -> int:
        return self._lifecycle.num_running

    def requests(self) -> list[FoundRequest]:
        """Returns where the requests are that have not ended."""
        generations = {generation.generation_id: found(generation) for generation in self._lifecycle.unfinished}
        return [*generations.values(), *(each for each in self._arrivals if each.generation_id not in generations)]

    def models(self) -> list[ServedModel]:
        return [*self._links.models, *self._links.adapters]

    async def submit(self, request: GenerationRequest, *, resumable: bool = True) -> str:
        """See `Core.submit`."""
        request.sampling.validate()
        self._allowance.check_max_tokens(request.tenant, request.sampling.max_tokens)
        self._admission.check_size(request.prompt)
        generation_id = random_id()
        with self._arrivals.during(RequestStage.ADMITTING, generation_id, request.request_id, request.model):
            return await self._submitted(generation_id, request, resumable)

    async def _submitted(self, generation_id: str, request: GenerationRequest, resumable: bool) -> str:
        if request.key is None:
            await self._start(generation_id, request, resumable)
            return generation_id
        deadline = self._deadline(request)
        holder_id = await self._keys.claim(request.key, generation_id, deadline - clock.unix_s())
        if holder_id != generation_id:
            return holder_id
        try:
            await self._start(generation_id, replace(request, deadline=deadline), True)
        except KeyTakenError as taken:
            return taken.generation_id
        return generation_id

    def follow(
        self,
        generation_id: str,
        from_index: Mapping[int, int] | None = None,
        owner_id: str = "",
        *,
        whole: bool = False,
        tenant: str = "",
    ) -> AsyncGenerator[GenerationEvent, None]:
        """See `Core.follow`."""
        generation = self._found(generation_id, tenant)
        # Before it resumes: a reader that is refused must not make it run.
        check_from_index(generation, from_index or {})
        if generation.started is not None and (generation.was_read or generation.epoch):
            self._telemetry.reattached.inc()
        if generation.resumable:
            self._lifecycle.resume(generation)
        return follow(generation, from_index or {}, whole=whole)

    async def cancel(self, generation_id: str, owner_id: str = "", *, tenant: str = "") -> None:
        """See `Core.cancel`."""
        self._lifecycle.cancel(self._found(generation_id, tenant))

    async def leave(self, generation_id: str) -> None:
        """See `Core.leave`."""
        generation = self._generations.get(generation_id)
        if not generation.num_readers:
            self._lifecycle.cancel(generation)

    async def interrupt(self, generation_id: str) -> bool:
        """Ends a generation without readers, so that its session can take a new turn.

        See `Lifecycle.interrupt`. Also returns False when the generation is not at this router.
        """
        generation = self._generations.find(generation_id)
        return generation is not None and await self._lifecycle.interrupt(generation)

    def end_refused(self, refused: Callable[[GenerationRequest], RyzansteinError | None]) -> int:
        """Ends generations of this router whose key has ended; see `Lifecycle.end_refused`."""
        return self._lifecycle.end_refused(refused)

    @property
    def held_prompt_bytes(self) -> int:
        """The memory of the prompts of generations that run or may go on."""
        return self._admission.held_bytes

    def find(self, generation_id: str) -> Generation | None:
        """Returns a generation that can be read here, or None."""
        return self._generations.find(generation_id)

    def _found(self, generation_id: str, tenant: str) -> Generation:
        """Returns a generation of the tenant. Another tenant's is as unknown as one that never was."""
        generation = self._generations.get(generation_id)
        if tenant not in ("", generation.request.tenant):
            self._telemetry.refused.labels("foreign_tenant").inc()
            raise errors.not_found("generation", generation_id)
        return generation

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
        request = with_own_deadline(request, record)
        settled, was_paused = has_settled(record.batches), has_paused(record.batches)
        turn, spoken = None, _new_messages(request, new_messages)
        if spoken and (not settled or was_paused):
            turn = await self._turns.resume(request.session_id, generation_id, spoken)
        generation = Generation(generation_id, request, self._generations, record.epoch)
        # Its readers at the other router were sent its end.
        generation.new_messages, generation.was_read = spoken, True
        generation.held_prompt = self._admission.hold_anyway(request.tenant, request.prompt)
        self._generations.add(generation)
        settled = restore(generation, record.batches)
        self._meter(generation)
        self._recorder.added(generation, new_messages)
        if request.key is not None and may_go_on(generation.error):
            self._keys.adopted(request.key, generation_id)
        if settled:
            self._lifecycle.keep_ended(generation, turn)
            place.leave()
        else:
            place.belongs_to(request.tenant)
            self._lifecycle.launch(generation, turn, place)
        return generation

    def _meter(self, generation: Generation) -> None:
        """Goes on counting a generation of another router where its journal ends."""
        request, started = generation.request, generation.started
        prompt_tokens = None if started is None or not started.node_id else started.prompt_tokens
        hold = self._allowance.adopt(request.tenant, generation.generation_id, prompt_tokens, generation.log.num_tokens)
        self._allowance.ends_at(hold, request.sampling.max_tokens, request.sampling.n)
        generation.meter = hold

    async def count_tokens(self, model: str, prompt: Prompt) -> int:
        """Counts a prompt's tokens at the least loaded node.

        Raises NOT_FOUND for a model that no node serves, otherwise the node's own error.
        """
        self._admission.check_size(prompt)
        return await count_prompt_tokens(self._links, self.model_of(model), prompt)

    async def tokenize(self, model: str, prompt: Prompt, *, special: bool = True, with_texts: bool = False) -> Tokenized:
        """See `Core.tokenize`."""
        self._admission.check_size(prompt)
        return await texts.tokenize(self._links, self.model_of(model), prompt, special=special, with_texts=with_texts)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """See `Core.detokenize`."""
        self._admission.check_size(TokenPrompt(tuple(token_ids)))
        return await texts.detokenize(self._links, self.model_of(model), token_ids)

    async def embed(self, request: EmbeddingRequest) -> list[Embedded]:
        """See `Core.embed`. A request takes one place, as a generation does."""
        request.validate()
        for i, given in enumerate(request.inputs):
            self._admission.check_size(given, f"inputs[{i}].")
        deadline = clock.unix_s() + self._policy.deadline_s if request.deadline is None else request.deadline
        request = replace(request, model=self._embedding_model(request.model), deadline=deadline)
        place, number = self._admission.enter(request.tenant), random_id()
        try:
            with self._arrivals.during(RequestStage.EMBEDDING, number, request.request_id, request.model):
                return await self._embedded(number, request)
        finally:
            place.leave()

    async def _embedded(self, number: str, request: EmbeddingRequest) -> list[Embedded]:
        """Charges a request for vectors to its tenant, and has them made."""
        hold = await self._allowance.admit(request.tenant, number, sum(map(estimated_tokens, request.inputs)))
        try:
            embedded = await self._embedder.embed(request)
            hold.accepted(sum(each.prompt_tokens for each in embedded))
            hold.settle(0)
        finally:
            hold.release()
        return embedded

    async def drain(self) -> None:
        """Does nothing: no other router knows this core's generations."""

    async def close(self) -> None:
        await self._recorder.close()
        await self._lifecycle.close()
        await self._keys.close()

    async def _start(self, generation_id: str, request: GenerationRequest, resumable: bool) -> None:
        try:
            entry = self._admitted(request)
            try:
                generation = await self._charged(generation_id, request, entry, resumable=resumable)
            except BaseException:
                entry.place.leave()
                entry.held.release()
                raise
            generation.held_prompt = entry.held
        except BaseException as error:
            if isinstance(error, RyzansteinError):
                self._telemetry.tenants.ended(request.tenant, "refused")
            if request.key is not None:
                self._keys.free(generation_id)
            raise
        if request.key is not None:
            self._keys.begun(generation_id)
        # While the node begins: a client that knows the id must find the generation at another
        # router.
        try:
            await self._recorder.flushed(generation)
        except asyncio.CancelledError:
            if request.key is None and not request.detached:  # no client can come back for it
                self._lifecycle.stop(generation)
            raise

    def _admitted(self, request: GenerationRequest) -> _Entry:
        place = self._admission.enter(request.tenant)
        try:
            return _Entry(place, self._admission.hold(request.tenant, request.prompt))
        except BaseException:
            place.leave()
            raise

    async def _charged(self, generation_id: str, request: GenerationRequest, entry: _Entry, *, resumable: bool) -> Generation:
        """Charges the request to its tenant, before it changes anything, and begins the generation."""
        hold = await self._allowance.admit(request.tenant, generation_id, estimated_tokens(request.prompt))
        try:
            self._allowance.ends_at(hold, request.sampling.max_tokens, request.sampling.n)
            entry.times.admitted_at = time.monotonic()
            return await self._begun(generation_id, request, entry, hold, resumable=resumable)
        except BaseException as error:
            hold.release(joined=isinstance(error, KeyTakenError))
            raise

    async def _begun(
        self, generation_id: str, request: GenerationRequest, entry: _Entry, hold: Hold, *, resumable: bool
    ) -> Generation:
        """Opens the session's turn and launches the generation, which then owns the place and the hold."""
        request, turn = await self._opened(request, generation_id)
        try:
            entry.held.grow_to(request.prompt)
            request = self._completed(request)
            entry.place.wait_for(request.model, self._generations.waiting(request.model))
            if has_middle(request.prompt):
                request = await filled(request, self._deadline(request), self._any_node)
            if turn is not None:
                await turn.ensure(request.public_model, request.tenant)
            if request.key is not None:
                await self._keys.confirm(generation_id)
            return self._launch(generation_id, request, turn, entry, hold, resumable=resumable)
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

    def _completed(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with all that a client may omit: the model, its own sampling values, a seed, a deadline."""
        sampling, (model, adapter) = request.sampling, self._named(request.model)
        defaults = self._links.sampling_defaults(model)
        seed = sampling.seed if sampling.seed is not None else random_seed()
        return replace(
            request,
            model=model,
            adapter=adapter,
            sampling=defaults.filled(sampling, seed=seed, keep_prompt_head=self._kept_head(request)),
            deadline=self._deadline(request),
            created=int(clock.unix_s()),
        )

    def _kept_head(self, request: GenerationRequest) -> int | None:
        """Returns the head of its prompt that is kept if that does not fit; None: it is refused.

        A prompt to fill in the middle is never cut: what is in its own middle says where that is.
        """
        sampling = request.sampling
        cut_by_client = sampling.keep_prompt_head is not None or sampling.truncate_prompt_tokens is not None
        if request.never_cut or has_middle(request.prompt) or cut_by_client:
            return sampling.keep_prompt_head
        return self._policy.keep_prompt_head

    def _deadline(self, request: GenerationRequest) -> float:
        return request.deadline if request.deadline is not None else clock.unix_s() + self._policy.deadline_s

    def model_of(self, name: str) -> str:
        """See `Core.model_of`."""
        return self._named(name)[0]

    def _embedding_model(self, name: str) -> str:
        model, adapter = self._named(name)
        if adapter is not None:
            raise errors.invalid("model", f"must be no adapter where vectors are wanted; its model is {model!r}"[:256], name)
        return model

    def _named(self, name: str) -> tuple[str, AdapterRef | None]:
        """Returns the model that a public name stands for, and its adapter if the name is that of one.

        Raises NO_NODES when no node is known at all; otherwise an unknown name is NOT_FOUND.
        """
        known = self._links.known_models
        if name and self._links.knows(name):
            return name, None
        if name and (found := self._links.adapter(name)) is not None:
            return found
        if not known:
            self._telemetry.refused.labels("no_nodes").inc()
            raise errors.no_nodes(name, "no node is linked")
        if name:
            raise errors.not_found("model", name)
        if len(known) > 1:
            raise errors.invalid("model", f"must be given, one of: {', '.join(sorted(known))}"[:256])
        return next(iter(known)), None

    def _launch(
        self, generation_id: str, request: GenerationRequest, turn: Turn | None, entry: _Entry, hold: Hold, *, resumable: bool
    ) -> Generation:
        generation = Generation(generation_id, request, self._generations, times=entry.times)
        generation.meter = hold
        self._generations.add(generation)
        entry.place.launched()
        if turn is not None:
            generation.new_messages = turn.new_messages
        if resumable:
            self._recorder.added(generation, len(generation.new_messages))
        self._lifecycle.launch(generation, turn, entry.place)
        return generation


def _new_messages(request: GenerationRequest, new_messages: int) -> tuple[Message, ...]:
    """Returns the last messages of a request, which form its session's turn."""
    if not request.session_id or not isinstance(request.prompt, ChatPrompt) or not new_messages:
        return ()
    return request.prompt.messages[-new_messages:]
