"""Converts whole answers to the responses of the unary calls."""

from __future__ import annotations

from typing import TypeVar

from ryzanstein.router.faces.answer import Answer
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.events import prompt_token_to_wire, token_logprobs_to_wire, usage_to_wire
from ryzanstein.wire.requests import message_to_wire

_Response = TypeVar("_Response", inference.ChatResponse, inference.CompleteResponse)


def whole_response(kind: type[_Response], answer: Answer) -> _Response:
    """Returns the answer as a response of this kind. Both kinds have the same fields."""
    return kind(
        generation_id=answer.started.generation_id,
        model=answer.started.model,
        node_id=answer.node_id,
        choices=[_choice(answer, number) for number in sorted(answer.reasons)],
        usage=usage_to_wire(answer.usage),
        prompt=map(prompt_token_to_wire, answer.prompt),
    )


def _choice(answer: Answer, number: int) -> inference.Choice:
    tokens, message = answer.tokens[number], answer.message(number)
    return inference.Choice(
        choice=number,
        text=message.content,
        token_ids=[token.token_id for token in tokens],
        finish_reason=inference.FinishReason.ValueType(answer.reason(number, message)),
        logprobs=token_logprobs_to_wire(tokens),
        tool_calls=message_to_wire(message).tool_calls,
        reasoning=message.reasoning,
    )
