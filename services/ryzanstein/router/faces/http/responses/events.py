"""The typed events of a streamed response, numbered from 0.

created, in_progress; each item is added, grows by deltas and is done; completed, or incomplete. A
generation that fails ends with failed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ryzanstein.generation.prompts import Message, Role, ToolCall
from ryzanstein.generation.request import NO_DEFAULTS, SamplingDefaults
from ryzanstein.generation.tokens import FinishReason, GenerationEvent, Started, Usage
from ryzanstein.replies.parts import CallDelta
from ryzanstein.replies.reader import ReplyDelta
from ryzanstein.router.faces.http.responses import shapes
from ryzanstein.router.faces.http.responses.body import ResponsesRequest
from ryzanstein.router.faces.http.responses.items import CUT, DONE, RUNNING, CallItem, Item, Items, MessageItem, ReasoningItem
from ryzanstein.router.faces.http.responses.shapes import Shape
from ryzanstein.router.faces.openai.answers.chunks import encoded
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.failures import HttpFailure
from ryzanstein.router.faces.openai.answers.pieces import Ending, Pieces, Speech


class ResponseEvents:
    """Converts the events of one generation to those of a response.

    `response` is the response as it stands.
    """

    def __init__(self, started: Started, body: ResponsesRequest, defaults: SamplingDefaults = NO_DEFAULTS) -> None:
        self.response = shapes.begun(started, body, defaults)
        self._pieces = Pieces(Cursor(), started)
        self._items = Items(started.generation_id)
        self._open: Item | None = None
        self._reason: FinishReason | None = None
        self._number = 0

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ended; None: it has not."""
        return self._reason

    @property
    def message(self) -> Message:
        """What was said, as the conversation has it."""
        items = self._items.all
        content = "".join(item.text for item in items if isinstance(item, MessageItem))
        reasoning = "".join(item.text for item in items if isinstance(item, ReasoningItem))
        calls = tuple(ToolCall(item.call_id, item.name, item.text) for item in items if isinstance(item, CallItem))
        return Message(Role.ASSISTANT, content, calls, reasoning=reasoning)

    def begin(self) -> Iterator[Shape]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def of(self, event: GenerationEvent) -> Iterator[Shape]:
        """Yields what an event adds; none for tokens whose text is not certain yet."""
        for piece in self._pieces.of(event):
            match piece:
                case Speech(_, wording, _):
                    yield from self._spoken(wording)
                case Ending(_, reason, _, wording):
                    yield from self._spoken(wording)
                    self._reason = reason

    def end(self) -> Iterator[Shape]:
        """Yields what follows the last text. The response is then as it is stored."""
        reason = FinishReason.CANCELLED if self._reason is None else self._reason
        if not self._items.all:
            yield from self._added(self._items.message())
        status, details = shapes.ended(reason)
        last = DONE if status == "completed" else CUT
        yield from self._closed(last)
        output = [item.shape(DONE if item is not self._items.all[-1] else last) for item in self._items.all]
        usage = shapes.usage_shape(self._pieces.usage or Usage(), self._pieces.reasoning_tokens)
        self.response |= {"status": status, "incomplete_details": details, "output": output, "usage": usage}
        kind = "response.completed" if status == "completed" else "response.incomplete"
        yield self._event(kind, response=self.response)

    def fail(self, failure: HttpFailure) -> Iterator[Shape]:
        self.response |= {"status": "failed", "error": {"code": failure.code or "server_error", "message": failure.message}}
        yield self._event("response.failed", response=self.response)

    def _spoken(self, wording: ReplyDelta) -> Iterator[Shape]:
        if wording.reasoning:
            yield from self._grown(ReasoningItem, wording.reasoning)
        if wording.content:
            yield from self._grown(MessageItem, wording.content)
        for call in wording.calls:
            yield from self._called(call)

    def _grown(self, kind: type[Item], text: str) -> Iterator[Shape]:
        if not isinstance(self._open, kind):
            yield from self._added(self._items.message() if kind is MessageItem else self._items.reasoning())
        yield from self._delta(text)

    def _called(self, call: CallDelta) -> Iterator[Shape]:
        if call.name:
            yield from self._added(self._items.call(call.id, call.name))
        if call.arguments:
            yield from self._delta(call.arguments)

    def _added(self, item: Item) -> Iterator[Shape]:
        yield from self._closed(DONE)
        self._open = item
        yield self._event("response.output_item.added", output_index=item.output_index, item=item.shape(RUNNING))
        if item.has_part:
            yield self._event("response.content_part.added", **item.place, part=item.part(""))

    def _delta(self, text: str) -> Iterator[Shape]:
        item = self._open
        if item is not None:
            yield self._event(f"response.{item.kind}.delta", **item.place, **item.delta(text))

    def _closed(self, status: str) -> Iterator[Shape]:
        """Yields the end of the item that is open, if one is."""
        item, self._open = self._open, None
        if item is None:
            return
        yield self._event(f"response.{item.kind}.done", **item.place, **item.done())
        if item.has_part:
            yield self._event("response.content_part.done", **item.place, part=item.part(item.text))
        yield self._event("response.output_item.done", output_index=item.output_index, item=item.shape(status))

    def _event(self, kind: str, **fields: object) -> Shape:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


class ResponseWriter:
    """Frames the events of a response as server-sent events."""

    def __init__(self, writer: ResponseEvents) -> None:
        self._events = writer

    def opening(self) -> bytes:
        return _framed(self._events.begin())

    def write(self, event: GenerationEvent) -> bytes:
        return _framed(self._events.of(event))

    def close(self) -> bytes:
        return _framed(self._events.end())

    def failed(self, failure: HttpFailure) -> bytes:
        return _framed(self._events.fail(failure))


def error_of_stream(failure: HttpFailure) -> bytes:
    """Returns the event of an error before a response has begun."""
    error = failure.body["error"]
    return _framed(iter([{"type": "error", "sequence_number": 0, **{key: error[key] for key in ("code", "message", "param")}}]))


def _framed(events: Iterator[Shape]) -> bytes:
    # One by one: an event shows the response as it stands, which the next one may change.
    return b"".join(f"event: {event['type']}\ndata: {encoded(event)}\n\n".encode() for event in events)
