"""Reads the text of one choice: reasoning first, then content and calls."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ryzanstein.generation.prompts import Message, Role, ToolCall
from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.replies.calls.harmony import harmony
from ryzanstein.replies.content import content_until
from ryzanstein.replies.families import FAMILIES
from ryzanstein.replies.parts import CallDelta, Content, Part, Reasoning, Sink
from ryzanstein.replies.source import Source, Step
from ryzanstein.replies.tags import HARMONY, TAGS, Tags

LONG_CHARS = 8192
"""Reading so much takes some milliseconds."""


class ReplyReader:
    """Reads one choice of a generation, from its first text on.

    What it has returned after some text is the same however the text was divided.
    """

    def __init__(self, format: ReplyFormat, generation_id: str, choice: int) -> None:
        self._format = format
        self._source = Source()
        self._sink = Sink(format, generation_id, choice)
        self._steps: Generator[None, None, None] | None = _reply(self._source, self._sink, format)
        next(self._steps)

    @property
    def thinking(self) -> bool | None:
        """Whether it is within the reasoning; None: it is not known yet whether there is any."""
        return self._sink.thinking

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return self._sink.num_calls

    def push(self, text: str) -> list[Part]:
        """Returns what became certain with this text."""
        if not text:
            return []
        self._source.add(text)
        self._go_on()
        return self._sink.taken()

    def end(self) -> list[Part]:
        """Returns what is left when the text has ended."""
        self._source.ended = True
        self._go_on()
        self._sink.end()
        return self._sink.taken()

    def _go_on(self) -> None:
        if self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What became certain: content, reasoning, and pieces of calls in order."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part]) -> ReplyDelta:
        return cls(
            "".join(part.text for part in parts if isinstance(part, Content)),
            "".join(part.text for part in parts if isinstance(part, Reasoning)),
            tuple(part for part in parts if isinstance(part, CallDelta)),
        )

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    @property
    def only_content(self) -> bool:
        return bool(self.content) and not self.reasoning and not self.calls


NOTHING = ReplyDelta()


def visible_reason(format: ReplyFormat | None, num_calls: int, reason: FinishReason) -> FinishReason:
    """Returns the reason that a client is shown: a plain end after calls is TOOL_CALLS, unless the function was named."""
    called = format is not None and num_calls > 0 and not format.named
    return FinishReason.TOOL_CALLS if called and reason is FinishReason.STOP else reason


def read_message(format: ReplyFormat | None, generation_id: str, choice: int, text: str) -> Message:
    """Returns a whole answer as a message of the conversation."""
    if format is None:
        return Message(Role.ASSISTANT, text)
    reader = ReplyReader(format, generation_id, choice)
    return joined([*reader.push(text), *reader.end()])


async def read_aside(format: ReplyFormat | None, generation_id: str, choice: int, text: str) -> Message:
    """Returns the same; a long answer is read in a thread, so that the loop goes on."""
    if format is None or len(text) <= LONG_CHARS:
        return read_message(format, generation_id, choice, text)
    return await asyncio.to_thread(read_message, format, generation_id, choice, text)


def joined(parts: Sequence[Part]) -> Message:
    """Returns the message that all parts of an answer make."""
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallDelta):
            if part.index == len(calls):
                calls.append([part.id, part.name, ""])
            calls[part.index][2] += part.arguments
    delta = ReplyDelta.of(parts)
    return Message(Role.ASSISTANT, delta.content, tuple(ToolCall(*call) for call in calls), reasoning=delta.reasoning)


def _reply(source: Source, sink: Sink, format: ReplyFormat) -> Step[None]:
    yield
    if format.thinking and format.tags == HARMONY:
        yield from harmony(source, sink)
        return
    if format.thinking:
        yield from _reasoning(source, sink, TAGS[format.tags], format.opened)
        yield from _answer_begin(source, sink, TAGS[format.tags])
    sink.thinking = False
    if format.calls:
        yield from FAMILIES[format.calls](source, sink)
    yield from content_until(source, sink)


def _answer_begin(source: Source, sink: Sink, tags: Tags) -> Step[None]:
    """Takes the tag that some models write before their answer; then the one behind it is none of the answer either."""
    begin, end = tags.answer
    if not begin:
        return
    source.mark()
    yield from source.space()
    if (yield from source.literal(begin)):
        source.unmark()
        sink.answer_end = end
        yield from source.space()
    else:
        sink.content(source.since_mark())


def _reasoning(source: Source, sink: Sink, tags: Tags, opened: bool) -> Step[None]:
    """Reads what stands between two tags, without the white space around it.

    `opened`: the prompt ends with the first of them. Otherwise an answer without it has no reasoning.
    """
    end = re.compile(re.escape(tags.end))
    sink.thinking = True if opened else None
    source.mark()
    yield from source.space()
    if not (yield from source.literal(tags.begin)) and not opened:
        sink.content(source.since_mark())
        return
    source.unmark()
    sink.thinking = True
    yield from source.space()
    space = ""
    while True:
        text, marker, ended = source.before((tags.end,), end)
        delta = text.rstrip()
        if delta:
            sink.reasoning(space + delta)
            space = ""
        space += text[len(delta) :]
        if marker or ended:
            break
        yield
    sink.thinking = False
    yield from source.space()
