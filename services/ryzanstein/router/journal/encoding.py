"""Converts generations to and from the bytes that a journal keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from ryzanstein import clock, errors
from ryzanstein.errors import ROUTER_TOO_OLD, Code, RyzansteinError
from ryzanstein.generation.request import KNOWN_FEATURES, Attempt, GenerationRequest, RequestKey
from ryzanstein.generation.tokens import FinishReason, NodeMove, PromptScores, Started, Token
from ryzanstein.router.generations.generation import PAUSED, Generation
from ryzanstein.router.journal.journal import JournalRecord
from ryzanstein.rpc.status import error_from_status, status_from_error
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import journal_pb2 as pb
from ryzanstein.wire.attempts import attempt_from_wire, submit_now
from ryzanstein.wire.events import (
    logprobs_from_wire,
    move_from_wire,
    move_to_wire,
    reply_to_wire,
    scores_from_wire,
    scores_to_wire,
    style_from_wire,
    token_logprobs_to_wire,
)

MAX_RUN_TOKENS = 4096


def encode_request(generation: Generation, new_messages: int) -> bytes:
    """Returns the encoded request.

    `new_messages`: how many of the request's last messages make its session's turn.
    """
    request = generation.request
    submit = submit_now(Attempt(generation.generation_id, 0, request, ()), 0)
    # Unix time by the clock of this host, which may be set before the entry is read.
    submit.ClearField("deadline")
    journalled = pb.JournalRequest(
        submit=submit, session_id=request.session_id, user=request.user, new_messages=new_messages, last_node=request.last_node
    )
    journalled.detached, journalled.kept = request.detached, request.kept
    journalled.tenant_named, journalled.never_cut = request.tenant_named, request.never_cut
    journalled.key_id = request.key_id
    journalled.created, journalled.answer_form = request.created, request.answer_form
    journalled.features.extend(sorted(request.features))
    if request.key is not None:
        journalled.key, journalled.key_body = request.key.name, request.key.body
    return journalled.SerializeToString()


def with_own_deadline(request: GenerationRequest, record: JournalRecord) -> GenerationRequest:
    """Returns the request of a record with its deadline by this host's clock.

    The record says how much time was left when it was last written, and the store how long ago that
    was: no clock that may be set, or differ between hosts, takes part. A record of an earlier version
    does not say it; then the clocks must agree.
    """
    batch = pb.JournalBatch.FromString(record.batches[-1]) if record.batches else pb.JournalBatch()
    given = batch if batch.HasField("time_left") else pb.JournalRequest.FromString(record.request).submit
    if not given.HasField("time_left"):
        return request
    return replace(request, deadline=clock.unix_s() + given.time_left.ToNanoseconds() / 1e9 - record.age_s)


def check_readable(generation_id: str, record: JournalRecord) -> None:
    """Raises NOT_FOUND for a record of which a part is damaged: what it was is lost."""
    try:
        pb.JournalRequest.FromString(record.request)
        for batch in record.batches:
            pb.JournalBatch.FromString(batch)
    except DecodeError as error:
        raise errors.not_found("generation", generation_id) from error


def decode_request(data: bytes) -> tuple[GenerationRequest, int]:
    """Returns the request and its number of new messages.

    Raises UNIMPLEMENTED, reason ROUTER_TOO_OLD, for one that a later version wrote and this one would
    read in part.
    """
    journalled = pb.JournalRequest.FromString(data)
    if unknown := set(journalled.features) - KNOWN_FEATURES:
        names = ", ".join(sorted(unknown))[:128]
        text = f"this router is of an earlier version, which does not know {names}: attach at another router"
        raise RyzansteinError(text, Code.UNIMPLEMENTED, ROUTER_TOO_OLD)
    request = attempt_from_wire(journalled.submit).request
    request = replace(
        request,
        session_id=journalled.session_id,
        user=journalled.user,
        last_node=journalled.last_node,
        detached=journalled.detached,
        created=journalled.created,
        answer_form=journalled.answer_form,
        kept=journalled.kept,
        tenant_named=journalled.tenant_named,
        key_id=journalled.key_id,
        never_cut=journalled.never_cut,
    )
    if journalled.key:
        request = replace(request, key=RequestKey(journalled.key, journalled.key_body))
    return request, journalled.new_messages


class BatchWriter:
    """Tracks what of one generation is in the journal, and encodes the rest as batches."""

    def __init__(self, generation: Generation, *, known: bool = False) -> None:
        """`known`: all that the generation has came from the journal."""
        self.generation = generation
        self._given = _Position(generation, full=known)
        self._sent = self._given

    @property
    def lag(self) -> int:
        """Tokens that are not in the journal."""
        return self.generation.log.num_tokens - self._given.num_tokens

    @property
    def news(self) -> bool:
        generation, given = self.generation, self._given
        return (
            generation.log.num_tokens != given.num_tokens
            or len(generation.ended) != given.num_ends
            or len(generation.prompt) != given.num_scored
            or (generation.started is not None) != given.started
            or generation.settled != given.settled
        )

    def next_batch(self) -> bytes:
        """Returns a batch of everything new.

        Call `written` when it is in the journal; otherwise the next batch includes it again.
        """
        generation, given = self.generation, self._given
        self._sent = sent = _Position(generation, full=True)
        batch = pb.JournalBatch()
        if generation.request.deadline is not None:
            batch.time_left.FromNanoseconds(int(max(0.0, generation.request.deadline - clock.unix_s()) * 1e9))
        if sent.num_tokens != given.num_tokens:
            self._add_runs(batch)
        if sent.num_ends != given.num_ends:
            batch.ends.extend(self._ends())
        if sent.num_scored != given.num_scored:
            scores = PromptScores(given.num_scored, generation.prompt[given.num_scored :])
            batch.prompt.CopyFrom(scores_to_wire(scores))
        if generation.started is not None and not given.started:
            batch.started.CopyFrom(_started_to_wire(generation.started))
        if sent.settled:
            batch.settled = True
            batch.num_delivered = generation.num_delivered
            if generation.error is not None:
                batch.error = status_from_error(generation.error).SerializeToString()
        return batch.SerializeToString()

    def written(self) -> None:
        self._given = self._sent

    def rewind(self) -> None:
        """Starts over: the journal has lost everything."""
        self._given = _Position(self.generation)

    def _add_runs(self, batch: pb.JournalBatch) -> None:
        for number, choice in enumerate(self.generation.log.choices):
            for first, tokens, node_id in choice.runs(self._given.tokens[number], MAX_RUN_TOKENS):
                token_ids, texts, logprobs = zip(*tokens, strict=True)
                run = batch.runs.add(choice=number, first_index=first, token_ids=token_ids, texts=texts, node_id=node_id)
                if logprobs[0] is not None:
                    run.logprobs.extend(token_logprobs_to_wire(tokens))
                if first in choice.moves:
                    run.moved.CopyFrom(move_to_wire(choice.moves[first]))

    def _ends(self) -> Iterator[pb.JournalEnd]:
        for end in self.generation.ended[self._given.num_ends :]:
            yield pb.JournalEnd(
                choice=end.choice,
                reason=inference.FinishReason.ValueType(end.reason),
                num_tokens=len(self.generation.log.choices[end.choice].tokens),
                cached_prompt_tokens=end.usage.cached_prompt_tokens,
            )


class _Position:
    """How much of a generation: nothing, or (`full`) all that there is now."""

    __slots__ = ("num_ends", "num_scored", "num_tokens", "settled", "started", "tokens")

    def __init__(self, generation: Generation, *, full: bool = False) -> None:
        self.tokens = [len(choice.tokens) if full else 0 for choice in generation.log.choices]
        self.num_tokens = sum(self.tokens)
        self.num_ends = len(generation.ended) if full else 0
        self.num_scored = len(generation.prompt) if full else 0
        self.started = full and generation.started is not None
        self.settled = full and generation.settled


def has_settled(batches: Sequence[bytes]) -> bool:
    """Returns whether nothing is left to do."""
    return bool(batches) and pb.JournalBatch.FromString(batches[-1]).settled


def has_paused(batches: Sequence[bytes]) -> bool:
    """Returns whether the generation was paused because it had no reader."""
    error = _error(pb.JournalBatch.FromString(batches[-1]).error) if batches else None
    return error is not None and error.reason == PAUSED


def restore(generation: Generation, batches: tuple[bytes, ...]) -> bool:
    """Restores an empty generation from a journal; returns whether it had ended.

    A generation that had failed is settled with its error. A generation that was resumed after that
    has not ended.
    """
    batch = pb.JournalBatch()
    for data in batches:
        batch = pb.JournalBatch.FromString(data)
        if batch.num_delivered:
            generation.num_delivered = batch.num_delivered
        if batch.HasField("started"):
            style = style_from_wire(batch.started.reply) if batch.started.HasField("reply") else None
            begun = batch.started
            generation.start(begun.node_id, begun.prompt_tokens, style, begun.omitted_prompt_tokens)
        if batch.HasField("prompt"):
            generation.score(scores_from_wire(batch.prompt))
        for run in batch.runs:
            generation.log.restore(run.choice, run.first_index, _tokens(run), run.node_id)
            generation.log.choices[run.choice].moves |= _move(run)
        for end in batch.ends:
            if generation.log.restore_end(end.choice, end.num_tokens, FinishReason(end.reason)):
                generation.end_choice(end.choice, end.cached_prompt_tokens)
    if batch.settled and (batch.error or generation.log.complete):
        generation.settle(_error(batch.error))
        return True
    return False


def _move(run: pb.JournalRun) -> dict[int, NodeMove]:
    """Returns how the tokens came to their node, by the index of the first one; empty: they did not, or it is not known."""
    return {run.first_index: move_from_wire(run.moved)} if run.HasField("moved") else {}


def _tokens(run: pb.JournalRun) -> list[Token]:
    if not run.logprobs:
        return [Token(token_id, text) for token_id, text in zip(run.token_ids, run.texts, strict=True)]
    columns = zip(run.token_ids, run.texts, run.logprobs, strict=True)
    return [Token(token_id, text, logprobs_from_wire(logprobs)) for token_id, text, logprobs in columns]


def _error(data: bytes) -> RyzansteinError | None:
    return error_from_status(status_pb2.Status.FromString(data)) if data else None


def _started_to_wire(started: Started) -> inference.GenerationStarted:
    return inference.GenerationStarted(
        generation_id=started.generation_id,
        model=started.model,
        node_id=started.node_id,
        prompt_tokens=started.prompt_tokens,
        omitted_prompt_tokens=started.omitted_prompt_tokens,
        reply=reply_to_wire(started.reply),
    )
