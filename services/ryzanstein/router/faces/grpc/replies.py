"""Converts the events of a stream for a client: text that is more than content comes as typed parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from ryzanstein.generation.events import Delta, Finished, GenerationEvent, Started
from ryzanstein.replies.follower import ReplyFollower
from ryzanstein.replies.reader import Said
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.answer import read_start
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.events import event_to_wire


async def read_events(
    events: AsyncIterator[GenerationEvent], seen: Mapping[int, int] | None = None
) -> AsyncIterator[inference.GenerationEvent]:
    """Yields the events as a client gets them. `seen`: the first index that it wants of each choice."""
    replies: ReplyFollower | None = None
    async for event in events:
        wire = event_to_wire(event)
        if isinstance(event, Started):
            replies = ReplyFollower(event, dict(seen or {})) if event.reply is not None else None
        elif replies is not None and isinstance(event, Delta):
            num_seen = replies.num_seen(event)
            said = replies.said(event)
            if num_seen == len(event.tokens):
                continue
            wire = event_to_wire(event._replace(first_index=event.first_index + num_seen, tokens=event.tokens[num_seen:]))
            _say(wire.delta, said)
        elif replies is not None and isinstance(event, Finished):
            said, reason = replies.ended(event)
            wire.finished.finish_reason = inference.FinishReason.ValueType(reason)
            _say(wire.finished, said)
        yield wire


async def attached(
    core: Core, generation_id: str, from_index: dict[int, int], tenant: str
) -> AsyncGenerator[inference.GenerationEvent, None]:
    """Follows a generation for a client that comes back.

    Answers with more than content are read from their beginning, also what the client has seen.
    """
    async with aclosing(core.follow(generation_id, from_index, tenant=tenant)) as events:
        started = await read_start(events)
        if started.reply is None or not any(from_index.values()):
            async for wire in read_events(_from_start(started, events), from_index):
                yield wire
            return
    async with aclosing(core.follow(generation_id, {}, tenant=tenant)) as events:
        async for wire in read_events(events, from_index):
            yield wire


async def _from_start(started: Started, events: AsyncIterator[GenerationEvent]) -> AsyncIterator[GenerationEvent]:
    yield started
    async for event in events:
        yield event


def _say(wire: inference.GenerationDelta | inference.GenerationFinished, said: Said) -> None:
    wire.text, wire.reasoning = said.content, said.reasoning
    for call in said.calls:
        wire.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
