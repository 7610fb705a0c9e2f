"""Converts whole answers to the responses of the unary calls."""

from __future__ import annotations

from ryzanstein.router.faces.answer import Answer
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire import token_logprobs_to_wire, usage_to_wire


def chat_response(answer: Answer) -> inference.ChatResponse:
    return inference.ChatResponse(
        generation_id=answer.started.generation_id,
        model=answer.started.model,
        node_id=answer.node_id,
        choices=_choices(answer),
        usage=usage_to_wire(answer.usage),
    )


def complete_response(answer: Answer) -> inference.CompleteResponse:
    return inference.CompleteResponse(
        generation_id=answer.started.generation_id,
        model=answer.started.model,
        node_id=answer.node_id,
        choices=_choices(answer),
        usage=usage_to_wire(answer.usage),
    )


def _choices(answer: Answer) -> list[inference.Choice]:
    return [_choice(answer, number) for number in sorted(answer.reasons)]


def _choice(answer: Answer, number: int) -> inference.Choice:
    tokens = answer.tokens[number]
    return inference.Choice(
        choice=number,
        text="".join(token.text for token in tokens),
        token_ids=[token.token_id for token in tokens],
        finish_reason=inference.FinishReason.ValueType(answer.reasons[number]),
        logprobs=token_logprobs_to_wire(tokens),
    )
