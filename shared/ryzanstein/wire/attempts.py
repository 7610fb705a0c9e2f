"""Attempts: what a router submits to a node, and what the node is to run."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein import clock, errors
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, NodePlace, valid_priority
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.adapters import ref_from_wire, ref_to_wire
from ryzanstein.wire.requests import (
    cache_scope_from_wire,
    conversation_from_wire,
    conversation_to_wire,
    message_to_wire,
    messages_from_wire,
    name_from_wire,
    sampling_from_wire,
    sampling_to_wire,
    template_from_wire,
    template_to_wire,
)
from ryzanstein.wire.timestamps import timestamp

_MAX_ADDRESS_CHARS = 300
_MAX_CONVERSATION_BYTES = 64


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
        backup=_place_to_wire(attempt.backup),
        previous=_place_to_wire(attempt.previous),
        conversation_key=attempt.conversation,
        cache_scope=request.cache_scope,
        adapter=ref_to_wire(request.adapter),
    )
    match request.prompt:
        case ChatPrompt() as chat if not chat.is_plain:
            submit.conversation.CopyFrom(conversation_to_wire(chat))
        case ChatPrompt(messages):
            submit.messages.messages.extend(message_to_wire(message) for message in messages)
        case TextPrompt(text):
            submit.text = text
        case TokenPrompt(token_ids):
            submit.token_ids.ids.extend(token_ids)
    if isinstance(request.prompt, ChatPrompt) and (options := template_to_wire(request.prompt.template)) is not None:
        submit.template_options.CopyFrom(options)
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

    Only the bounds of sampling, tenant, cache scope, adapter and priority are checked; the router is trusted for the
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
        cache_scope=cache_scope_from_wire(submit.cache_scope),
        request_id=submit.request_id,
        traceparent=submit.traceparent,
        adapter=ref_from_wire(submit.adapter, "adapter") if submit.HasField("adapter") else None,
    )
    return Attempt(
        submit.generation_id,
        submit.attempt,
        request,
        tuple(generated),
        submit.accepted_before,
        _place_from_wire(submit.backup, "backup"),
        _place_from_wire(submit.previous, "previous"),
        _conversation(submit),
    )


def _place_to_wire(place: NodePlace | None) -> worker.NodePlace | None:
    return None if place is None else worker.NodePlace(node_id=place.node_id, address=place.address)


def _place_from_wire(place: worker.NodePlace, field: str) -> NodePlace | None:
    if len(place.address) > _MAX_ADDRESS_CHARS:
        raise errors.invalid(f"{field}.address", f"must have at most {_MAX_ADDRESS_CHARS} characters", len(place.address))
    return NodePlace(name_from_wire(place.node_id, f"{field}.node_id"), place.address) if place.address else None


def _conversation(submit: worker.Submit) -> bytes:
    if len(submit.conversation_key) > _MAX_CONVERSATION_BYTES:
        raise errors.invalid(
            "conversation_key", f"must have at most {_MAX_CONVERSATION_BYTES} bytes", len(submit.conversation_key)
        )
    return submit.conversation_key


def _with_options(prompt: ChatPrompt, submit: worker.Submit) -> ChatPrompt:
    return replace(prompt, template=template_from_wire(submit.template_options))


def _prompt_from_wire(submit: worker.Submit) -> Prompt:
    match submit.WhichOneof("prompt"):
        case "messages":
            return _with_options(ChatPrompt(messages_from_wire(submit.messages.messages)), submit)
        case "conversation":
            return _with_options(conversation_from_wire(submit.conversation), submit)
        case "text":
            return TextPrompt(submit.text)
        case "token_ids":
            return TokenPrompt(tuple(submit.token_ids.ids))
        case _:
            raise errors.invalid("prompt", "messages, text, token_ids or a conversation must be given")
