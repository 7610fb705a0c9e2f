"""Converts whole answers to the responses of the unary calls."""

from __future__ import annotations

from typing import TypeVar

from ryzanstein.router.faces.answer import Answer
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.events import token_logprobs_to_wire, usage_to_wire

_Response = TypeVar("_Response", inference.ChatResponse, inference.CompleteResponse)


def whole_response(kind: type[_Response], answer: Answer) -> _Response:
    """Returns the answer as a response of this kind. Both kinds have the same fields."""
    return kind(
        generation_id=answer.started.generation_id,
        model=answer.started.model,
        node_id=answer.node_id,
        choices=[_choice(answer, number) for number in sorted(answer.reasons)],
        usage=usage_to_wire(answer.usage),
    )


def _choice(answer: Answer, number: int) -> inference.Choice:
    tokens = answer.tokens[number]
    return inference.Choice(
        choice=number,
        text="".join(token.text for token in tokens),
        token_ids=[token.token_id for token in tokens],
        finish_reason=inference.FinishReason.ValueType(answer.reasons[number]),
        logprobs=token_logprobs_to_wire(tokens),
    )
