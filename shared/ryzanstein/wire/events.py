"""What a generation produces: events of a stream, usage and logprobs."""

from __future__ import annotations

from collections.abc import Iterable

from ryzanstein import errors
from ryzanstein.generation.reply_format import THINK, ReplyFormat, ReplyStyle
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
from ryzanstein.v1 import worker_pb2 as worker
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
        thinking=reply.thinking and reply.tags == THINK,
        opened=reply.opened,
        tools=reply.tools,
        max_calls=reply.max_calls,
        named=reply.named,
        tags=other_tags(reply),
        text_arguments=reply.texts,
        nullable_arguments=reply.nullable,
    )


def reply_from_wire(wire: inference.ReplyFormat) -> ReplyFormat:
    style = style_from_wire(wire)
    return ReplyFormat(
        style.calls,
        style.thinking,
        style.opened,
        tuple(wire.tools),
        wire.max_calls,
        wire.named,
        style.tags,
        tuple(wire.text_arguments),
        tuple(wire.nullable_arguments),
    )


def style_to_wire(style: ReplyStyle) -> worker.ReplyStyle:
    """Returns a style. A peer that knows no other tags than `<think>` reads what stands between others as content."""
    thinking = style.thinking and style.tags == THINK
    return worker.ReplyStyle(calls=style.calls, thinking=thinking, opened=style.opened, tags=other_tags(style))


def style_from_wire(wire: worker.ReplyStyle | inference.ReplyFormat) -> ReplyStyle:
    return ReplyStyle(wire.calls, wire.thinking or bool(wire.tags), wire.opened, wire.tags or THINK)


def other_tags(style: ReplyStyle | ReplyFormat) -> str:
    """Returns the name of the tags around reasoning, if they are not `<think>`."""
    return style.tags if style.thinking and style.tags != THINK else ""


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
