"""What a generation produces: events of a stream, usage and logprobs."""

from __future__ import annotations

from collections.abc import Iterable

from ryzanstein import errors
from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.generation.tokens import (
    Delta,
    Finished,
    FinishReason,
    GenerationEvent,
    NodeMove,
    PromptScores,
    PromptToken,
    Started,
    Token,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.timestamps import duration


def usage_to_wire(usage: Usage) -> inference.Usage:
    return inference.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        omitted_prompt_tokens=usage.omitted_prompt_tokens,
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> inference.TokenLogprobs:
    return inference.TokenLogprobs(
        logprob=logprobs.logprob,
        top=map(_top_to_wire, logprobs.top),
        text=logprobs.text,
        bytes=logprobs.token_bytes,
    )


def logprobs_from_wire(wire: inference.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        wire.logprob,
        tuple(map(_top_from_wire, wire.top)),
        wire.text if wire.HasField("text") else None,
        wire.bytes if wire.HasField("bytes") else None,
    )


def token_logprobs_to_wire(tokens: Iterable[Token]) -> list[inference.TokenLogprobs]:
    return [logprobs_to_wire(token.logprobs) for token in tokens if token.logprobs is not None]


def prompt_token_to_wire(token: PromptToken) -> inference.PromptToken:
    return inference.PromptToken(
        token_id=token.token_id, text=token.text, logprob=token.logprob, top=map(_top_to_wire, token.top)
    )


def scores_to_wire(scores: PromptScores) -> inference.GenerationPrompt:
    return inference.GenerationPrompt(first_index=scores.first_index, tokens=map(prompt_token_to_wire, scores.tokens))


def scores_from_wire(wire: inference.GenerationPrompt) -> PromptScores:
    return PromptScores(
        wire.first_index,
        [
            PromptToken(
                token.token_id,
                token.text,
                token.logprob if token.HasField("logprob") else None,
                tuple(map(_top_from_wire, token.top)),
            )
            for token in wire.tokens
        ],
    )


def _top_to_wire(top: TopLogprob) -> inference.TokenLogprob:
    return inference.TokenLogprob(token_id=top.token_id, text=top.text, logprob=top.logprob, bytes=top.token_bytes)


def _top_from_wire(top: inference.TokenLogprob) -> TopLogprob:
    return TopLogprob(top.token_id, top.text, top.logprob, top.bytes if top.HasField("bytes") else None)


def reply_to_wire(reply: ReplyFormat | None) -> inference.ReplyFormat | None:
    if reply is None:
        return None
    return inference.ReplyFormat(
        calls=reply.calls,
        thinking=reply.thinking,
        opened=reply.opened,
        tools=reply.tools,
        max_calls=reply.max_calls,
        named=reply.named,
    )


def reply_from_wire(wire: inference.ReplyFormat) -> ReplyFormat:
    return ReplyFormat(wire.calls, wire.thinking, wire.opened, tuple(wire.tools), wire.max_calls, wire.named)


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
                    created=event.created,
                    answer_form=event.answer_form,
                    reply=reply_to_wire(event.reply),
                    omitted_prompt_tokens=event.omitted_prompt_tokens,
                )
            )
        case PromptScores():
            return inference.GenerationEvent(prompt=scores_to_wire(event))
        case Delta():
            return inference.GenerationEvent(
                delta=inference.GenerationDelta(
                    choice=event.choice,
                    first_index=event.first_index,
                    token_ids=[token.token_id for token in event.tokens],
                    text=event.text,
                    logprobs=token_logprobs_to_wire(event.tokens),
                    node_id=event.node_id,
                    moved=None if event.moved is None else move_to_wire(event.moved),
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
            return Started(
                begun.generation_id,
                begun.model,
                begun.node_id,
                begun.prompt_tokens,
                begun.created,
                begun.answer_form,
                reply_from_wire(begun.reply) if begun.HasField("reply") else None,
                begun.omitted_prompt_tokens,
            )
        case "prompt":
            return scores_from_wire(wire.prompt)
        case "delta":
            return _delta_from_wire(wire.delta)
        case "finished":
            usage = wire.finished.usage
            counted = Usage(
                usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens, usage.omitted_prompt_tokens
            )
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
    moved = move_from_wire(delta.moved) if delta.HasField("moved") else None
    return Delta(delta.choice, delta.first_index, tokens, delta.node_id, moved)


def move_to_wire(move: NodeMove) -> inference.NodeMove:
    silence = duration(move.silence_s)
    return inference.NodeMove(from_node_id=move.from_node_id, cause=move.cause, silence=silence, attempt=move.attempt)


def move_from_wire(move: inference.NodeMove) -> NodeMove:
    return NodeMove(move.from_node_id, move.cause, move.silence.ToNanoseconds() / 1e9, move.attempt)
