"""A whole answer, for callers that do not stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ryzanstein import errors
from ryzanstein.generation.prompts import Message
from ryzanstein.generation.tokens import (
    Delta,
    Finished,
    FinishReason,
    GenerationEvent,
    PromptScores,
    PromptToken,
    Started,
    Token,
    Usage,
)
from ryzanstein.replies.reader import read_aside, visible_reason

_QUICK_TOKENS = 1024


@dataclass(slots=True)
class Answer:
    """The events of a generation, collected.

    `node_id` is the node of the last token. `tokens` and `reasons` have an entry per choice.
    `usage` counts all choices. `prompt` has log probabilities where they were asked for.
    """

    started: Started
    node_id: str
    usage: Usage = field(default_factory=Usage)
    tokens: dict[int, list[Token]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    prompt: list[PromptToken] = field(default_factory=list)
    _messages: dict[int, Message] = field(default_factory=dict)

    @property
    def is_large(self) -> bool:
        """Whether it is to be written in a thread: it has log probabilities, or many tokens."""
        choices = self.tokens.values()
        scored = any(tokens and tokens[0].logprobs is not None for tokens in choices)
        return bool(self.prompt) or scored or sum(map(len, choices)) > _QUICK_TOKENS

    def message(self, choice: int) -> Message:
        """Returns what a choice says."""
        return self._messages[choice]

    def reason(self, choice: int, message: Message) -> FinishReason:
        """Returns how a choice that says this is shown to have ended."""
        return visible_reason(self.started.reply, len(message.tool_calls), self.reasons[choice])

    @classmethod
    async def read(cls, events: AsyncIterator[GenerationEvent]) -> Answer:
        """Reads a generation to its end. Raises the generation's error when it failed."""
        started = await read_start(events)
        answer = cls(started, started.node_id)
        async for event in events:
            answer._add(event)
        for choice in answer.reasons:
            text = "".join(token.text for token in answer.tokens[choice])
            answer._messages[choice] = await read_aside(started.reply, started.generation_id, choice, text)
        return answer

    def _add(self, event: GenerationEvent) -> None:
        match event:
            case PromptScores():
                self.prompt += event.tokens
            case Delta():
                self.tokens[event.choice].extend(event.tokens)
                self.node_id = event.node_id
            case Finished():
                self.reasons[event.choice] = event.reason
                self.usage = event.usage


async def read_start(events: AsyncIterator[GenerationEvent]) -> Started:
    """Returns the first event of a generation. Raises INTERNAL when that is not its start."""
    event = await anext(events, None)
    if not isinstance(event, Started):
        raise errors.internal("the generation did not begin with its start")
    return event
