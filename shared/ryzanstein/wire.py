"""Converts domain values to and from `ryzanstein.v1`. The only module that depends on both.

`*_from_wire` raise INVALID_ARGUMENT, which names the field; `*_to_wire` cannot fail. Enums are
open: a number that only a newer peer knows becomes UNSPECIFIED, and is refused only where
UNSPECIFIED is refused: in the role of a client's message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from ryzanstein import clock, errors
from ryzanstein.cluster import Beat, Deployment, Load, Node, NodeState
from ryzanstein.generation import (
    MAX_LOGIT_BIAS,
    MAX_NAME_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Attempt,
    ChatPrompt,
    ChoiceProgress,
    Delta,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Message,
    Prompt,
    Role,
    SamplingParams,
    Started,
    TextPrompt,
    Token,
    TokenLogprobs,
    TokenPrompt,
    TopLogprob,
    Usage,
    valid_priority,
)
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker

_ROLES = {
    inference.ROLE_SYSTEM: Role.SYSTEM,
    inference.ROLE_USER: Role.USER,
    inference.ROLE_ASSISTANT: Role.ASSISTANT,
}
_ROLES_TO_WIRE = {role: number for number, role in _ROLES.items()}
_OPTIONAL_PARAMS = tuple(
    name for name in SamplingParams.__dataclass_fields__ if name not in ("stop", "stop_token_ids", "logit_bias")
)


def message_from_wire(message: inference.Message, field: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise errors.invalid(f"{field}.role", "must be ROLE_SYSTEM, ROLE_USER or ROLE_ASSISTANT", message.role)
    return Message(role, message.content)


@dataclass(frozen=True, slots=True)
class MostParts:
    """The most parts that a prompt may have: converting each of them holds the event loop."""

    messages: int = 65_536
    token_ids: int = 4 * 2**20


_ANY = MostParts()


def _at_most(bound: int, values: Sized, field: str, what: str = "entries") -> None:
    if len(values) > bound:
        raise errors.invalid(field, f"must have at most {bound} {what}", len(values))


def messages_from_wire(messages: Sequence[inference.Message], most: MostParts = _ANY) -> tuple[Message, ...]:
    _at_most(most.messages, messages, "messages", "messages")
    return tuple(message_from_wire(message, f"messages[{i}]") for i, message in enumerate(messages))


def message_to_wire(message: Message) -> inference.Message:
    return inference.Message(role=_ROLES_TO_WIRE[message.role], content=message.content)


def sampling_from_wire(wire: inference.SamplingParams) -> SamplingParams:
    """Returns validated parameters; absent fields have their defaults."""
    _at_most(MAX_STOP_STRINGS, wire.stop, "sampling.stop")
    _at_most(MAX_STOP_TOKEN_IDS, wire.stop_token_ids, "sampling.stop_token_ids")
    _at_most(MAX_LOGIT_BIAS, wire.logit_bias, "sampling.logit_bias")
    given = {name: getattr(wire, name) for name in _OPTIONAL_PARAMS if wire.HasField(name)}  # type: ignore[arg-type]
    if any(isinstance(value, float) and not math.isfinite(value) for value in given.values()):
        bad = next(k for k, v in given.items() if isinstance(v, float) and not math.isfinite(v))
        raise errors.invalid(f"sampling.{bad}", "must be a finite number", given[bad])
    if given.get("top_k") == 0:
        raise errors.invalid("sampling.top_k", "must be at least 1; omit it for no limit", 0)
    params = SamplingParams(
        **given,
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        logit_bias=tuple(sorted(wire.logit_bias.items())),
    )
    params.validate()
    return params


def sampling_to_wire(params: SamplingParams) -> inference.SamplingParams:
    wire = inference.SamplingParams(stop=params.stop, stop_token_ids=params.stop_token_ids, logit_bias=dict(params.logit_bias))
    for name in _OPTIONAL_PARAMS:
        value = getattr(params, name)
        if value is not None and not (name == "top_k" and value == 0):
            setattr(wire, name, value)
    return wire


def name_from_wire(value: str, field: str) -> str:
    """Returns a session id, user or model name of at most 128 characters."""
    if len(value) > MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_NAME_CHARS} characters", len(value))
    return value


def chat_from_wire(chat: inference.ChatRequest, most: MostParts = _ANY) -> GenerationRequest:
    if not chat.messages:
        raise errors.invalid("messages", "must have at least one message")
    return GenerationRequest(
        model=name_from_wire(chat.model, "model"),
        prompt=ChatPrompt(messages_from_wire(chat.messages, most)),
        sampling=sampling_from_wire(chat.sampling),
        session_id=name_from_wire(chat.session_id, "session_id"),
        user=name_from_wire(chat.user, "user"),
        priority=valid_priority(chat.priority),
    )


def complete_from_wire(complete: inference.CompleteRequest, most: MostParts = _ANY) -> GenerationRequest:
    prompt: Prompt
    if complete.WhichOneof("prompt") == "token_ids":
        _at_most(most.token_ids, complete.token_ids.ids, "token_ids", "ids")
        prompt = TokenPrompt(tuple(complete.token_ids.ids))
        if not prompt.token_ids:
            raise errors.invalid("token_ids", "must have at least one id")
    else:
        prompt = TextPrompt(complete.text)
        if not complete.text:
            raise errors.invalid("prompt", "text or token_ids must be given and must not be empty")
    return GenerationRequest(
        model=name_from_wire(complete.model, "model"),
        prompt=prompt,
        sampling=sampling_from_wire(complete.sampling),
        user=name_from_wire(complete.user, "user"),
        priority=valid_priority(complete.priority),
    )


def usage_to_wire(usage: Usage) -> inference.Usage:
    return inference.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> inference.TokenLogprobs:
    return inference.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[
            inference.TokenLogprob(token_id=top.token_id, text=top.text, logprob=top.logprob, bytes=top.token_bytes)
            for top in logprobs.top
        ],
        text=logprobs.text,
        bytes=logprobs.token_bytes,
    )


def logprobs_from_wire(wire: inference.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        wire.logprob,
        tuple(
            TopLogprob(top.token_id, top.text, top.logprob, top.bytes if top.HasField("bytes") else None) for top in wire.top
        ),
        wire.text if wire.HasField("text") else None,
        wire.bytes if wire.HasField("bytes") else None,
    )


def token_logprobs_to_wire(tokens: Iterable[Token]) -> list[inference.TokenLogprobs]:
    return [logprobs_to_wire(token.logprobs) for token in tokens if token.logprobs is not None]


def event_to_wire(event: GenerationEvent) -> inference.GenerationEvent:
    """Returns an event of a client's stream."""
    match event:
        case Started():
            return inference.GenerationEvent(
                started=inference.GenerationStarted(
                    generation_id=event.generation_id,
                    model=event.model,
                    node_id=event.node_id,
                    prompt_tokens=event.prompt_tokens,
                )
            )
        case Delta():
            return inference.GenerationEvent(
                delta=inference.GenerationDelta(
                    choice=event.choice,
                    first_index=event.first_index,
                    token_ids=[token.token_id for token in event.tokens],
                    text=event.text,
                    logprobs=token_logprobs_to_wire(event.tokens),
                    node_id=event.node_id,
                )
            )
        case Finished():
            return inference.GenerationEvent(
                finished=inference.GenerationFinished(
                    choice=event.choice,
                    finish_reason=inference.FinishReason.ValueType(event.reason),
                    usage=usage_to_wire(event.usage),
                )
            )


def event_from_wire(wire: inference.GenerationEvent) -> GenerationEvent:
    """Returns an event of another router's stream. The first token of a delta gets all its text."""
    match wire.WhichOneof("kind"):
        case "started":
            begun = wire.started
            return Started(begun.generation_id, begun.model, begun.node_id, begun.prompt_tokens)
        case "delta":
            return _delta_from_wire(wire.delta)
        case "finished":
            usage = wire.finished.usage
            counted = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)
            return Finished(wire.finished.choice, FinishReason(wire.finished.finish_reason), counted)
        case _:
            raise errors.invalid("event", "must be started, delta or finished")


def _delta_from_wire(delta: inference.GenerationDelta) -> Delta:
    texts = (delta.text, *("" for _ in delta.token_ids[1:]))
    if delta.logprobs:
        columns = zip(delta.token_ids, texts, delta.logprobs, strict=True)
        tokens = [Token(token_id, text, logprobs_from_wire(logprobs)) for token_id, text, logprobs in columns]
    else:
        tokens = [Token(token_id, text) for token_id, text in zip(delta.token_ids, texts, strict=True)]
    return Delta(delta.choice, delta.first_index, tokens, delta.node_id)


def attempt_to_wire(attempt: Attempt, handle: int) -> worker.Submit:
    """Returns what a router submits to a node. It contains only begun and finished choices."""
    request = attempt.request
    submit = worker.Submit(
        handle=handle,
        generation_id=attempt.generation_id,
        attempt=attempt.attempt,
        model=request.model,
        sampling=sampling_to_wire(request.sampling),
        generated=[
            worker.GeneratedTokens(choice=i, token_ids=choice.token_ids, finished=choice.finished)
            for i, choice in enumerate(attempt.generated)
            if choice.token_ids or choice.finished
        ],
        priority=request.priority,
        traceparent=request.traceparent,
        request_id=request.request_id,
        tenant=request.tenant,
        accepted_before=attempt.accepted_before,
    )
    match request.prompt:
        case ChatPrompt(messages):
            submit.messages.messages.extend(message_to_wire(message) for message in messages)
        case TextPrompt(text):
            submit.text = text
        case TokenPrompt(token_ids):
            submit.token_ids.ids.extend(token_ids)
    if request.deadline is not None:
        submit.deadline.CopyFrom(timestamp(request.deadline))
    return submit


def submit_now(attempt: Attempt, handle: int) -> worker.Submit:
    """Returns the same with the time left by this host's clock, to be sent at once."""
    submit = attempt_to_wire(attempt, handle)
    if attempt.request.deadline is not None:
        submit.time_left.FromNanoseconds(int(max(0.0, attempt.request.deadline - clock.unix_s()) * 1e9))
    return submit


def _deadline(submit: worker.Submit) -> float | None:
    """Returns the deadline, by this host's clock if the time left is given."""
    if submit.HasField("time_left"):
        return clock.unix_s() + submit.time_left.ToNanoseconds() / 1e9
    return submit.deadline.ToNanoseconds() / 1e9 if submit.HasField("deadline") else None


def attempt_from_wire(submit: worker.Submit) -> Attempt:
    """Returns the attempt that a node is to run.

    Only the bounds of sampling, tenant and priority are checked; the router is trusted for the
    others.
    """
    sampling = sampling_from_wire(submit.sampling)
    generated = [ChoiceProgress()] * sampling.n
    for choice in submit.generated:
        if choice.choice >= sampling.n:
            raise errors.invalid("generated.choice", f"must be less than n ({sampling.n})", choice.choice)
        generated[choice.choice] = ChoiceProgress(tuple(choice.token_ids), choice.finished)
    request = GenerationRequest(
        model=submit.model,
        prompt=_prompt_from_wire(submit),
        sampling=sampling,
        deadline=_deadline(submit),
        priority=valid_priority(submit.priority),
        tenant=name_from_wire(submit.tenant, "tenant"),
        request_id=submit.request_id,
        traceparent=submit.traceparent,
    )
    return Attempt(submit.generation_id, submit.attempt, request, tuple(generated), submit.accepted_before)


def _prompt_from_wire(submit: worker.Submit) -> Prompt:
    match submit.WhichOneof("prompt"):
        case "messages":
            return ChatPrompt(messages_from_wire(submit.messages.messages))
        case "text":
            return TextPrompt(submit.text)
        case "token_ids":
            return TokenPrompt(tuple(submit.token_ids.ids))
        case _:
            raise errors.invalid("prompt", "messages, text or token_ids must be given")


def timestamp(unix_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(unix_s * 1e9))
    return stamp


def unix_s(stamp: Timestamp) -> float:
    """Returns the Unix time of any timestamp: even an invalid one from a peer is harmless."""
    return (stamp.seconds * 10**9 + stamp.nanos) / 1e9


def load_to_wire(load: Load) -> worker.Load:
    return worker.Load(**{name: getattr(load, name) for name in Load.__dataclass_fields__})


def load_from_wire(wire: worker.Load) -> Load:
    return Load(wire.running, wire.waiting, wire.capacity, wire.kv_blocks_used, wire.kv_blocks_total)


def beat_to_wire(beat: Beat) -> worker.Beat:
    return worker.Beat(
        sequence=beat.sequence,
        state=worker.NodeState.ValueType(beat.state),
        model=beat.model,
        context_length=beat.context_length,
        load=load_to_wire(beat.load),
        step=beat.step,
        reason=beat.reason,
        time=timestamp(beat.time),
        profiling=beat.profiling,
    )


def beat_from_wire(wire: worker.Beat) -> Beat:
    return Beat(
        wire.sequence,
        NodeState(wire.state),
        wire.model,
        wire.context_length,
        load_from_wire(wire.load),
        wire.step,
        wire.reason,
        unix_s(wire.time),
        wire.profiling,
    )


def node_to_wire(node: Node) -> orchestrator.Node:
    return orchestrator.Node(
        node_id=node.node_id,
        address=node.address,
        incarnation=node.incarnation,
        tp=node.tp,
        state=worker.NodeState.ValueType(node.state),
        model=node.model,
        context_length=node.context_length,
        load=load_to_wire(node.load),
        drain_requested=node.drain_requested,
        join_time=timestamp(node.join_time),
        beat_time=timestamp(node.beat_time),
    )


def node_from_wire(wire: orchestrator.Node) -> Node:
    return Node(
        node_id=wire.node_id,
        address=wire.address,
        incarnation=wire.incarnation,
        tp=wire.tp,
        state=NodeState(wire.state),
        model=wire.model,
        context_length=wire.context_length,
        load=load_from_wire(wire.load),
        drain_requested=wire.drain_requested,
        join_time=unix_s(wire.join_time),
        beat_time=unix_s(wire.beat_time),
    )


def deployment_to_wire(deployment: Deployment) -> orchestrator.Deployment:
    return orchestrator.Deployment(model=deployment.model, path=deployment.path, replicas=deployment.replicas)


def deployment_from_wire(wire: orchestrator.Deployment) -> Deployment:
    return Deployment(wire.model, wire.path, wire.replicas)


def enum_name(enum: Any, number: int) -> str:
    """Returns a value's name for people, in lower case and without its enum's prefix.

    A value that only a newer peer knows is `unspecified`.
    """
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return str(enum.Name(number if number in enum.values() else 0)).removeprefix(prefix).lower()
