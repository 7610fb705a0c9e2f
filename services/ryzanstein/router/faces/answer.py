"""Collects a generation's events into a whole answer, for the unary calls."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ryzanstein.generation import Delta, Finished, GenerationEvent, Started, Token, Usage
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire import token_logprobs_to_wire, usage_to_wire


class Answer:
    """A whole answer: its choices, the node of the last token, and the usage over all choices."""

    def __init__(self) -> None:
        self.generation_id = ""
        self.model = ""
        self.node_id = ""
        self.usage = Usage()
        self._tokens: dict[int, list[Token]] = {}
        self._ends: dict[int, Finished] = {}

    async def read(self, events: AsyncIterator[GenerationEvent]) -> Answer:
        async for event in events:
            self._add(event)
        return self

    def _add(self, event: GenerationEvent) -> None:
        match event:
            case Started():
                self.generation_id, self.model, self.node_id = event.generation_id, event.model, event.node_id
            case Delta():
                self._tokens.setdefault(event.choice, []).extend(event.tokens)
                self.node_id = event.node_id
            case Finished():
                self._ends[event.choice] = event
                self.usage = event.usage

    def _choice(self, number: int) -> inference.Choice:
        tokens = self._tokens.get(number, [])
        return inference.Choice(
            choice=number,
            text="".join(token.text for token in tokens),
            token_ids=[token.token_id for token in tokens],
            finish_reason=inference.FinishReason.ValueType(self._ends[number].reason),
            logprobs=token_logprobs_to_wire(tokens),
        )

    def chat_response(self) -> inference.ChatResponse:
        return inference.ChatResponse(
            generation_id=self.generation_id,
            model=self.model,
            node_id=self.node_id,
            choices=[self._choice(number) for number in sorted(self._ends)],
            usage=usage_to_wire(self.usage),
        )

    def complete_response(self) -> inference.CompleteResponse:
        return inference.CompleteResponse(
            generation_id=self.generation_id,
            model=self.model,
            node_id=self.node_id,
            choices=[self._choice(number) for number in sorted(self._ends)],
            usage=usage_to_wire(self.usage),
        )
