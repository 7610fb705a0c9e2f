"""The typed events of a streamed response, numbered from 0.

created, in_progress; the item and its part are added; text deltas; the text, the part and the item
are done; completed, or incomplete. A generation that fails ends with failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ryzanstein.generation import FinishReason, GenerationEvent, Started, Usage
from ryzanstein.router.faces.http.cursor import Cursor
from ryzanstein.router.faces.http.failures import HttpFailure
from ryzanstein.router.faces.http.pieces import Ending, Opening, Pieces, Speech
from ryzanstein.router.faces.http.responses import shapes
from ryzanstein.router.faces.http.responses.body import ResponsesRequest
from ryzanstein.router.faces.http.responses.shapes import Shape


class ResponseEvents:
    """Converts the events of one generation to those of a response.

    `response` is the response as it stands, `text` its text so far.
    """

    def __init__(self, started: Started, body: ResponsesRequest) -> None:
        self.response = shapes.begun(started, body)
        self._generation_id = started.generation_id
        self._pieces = Pieces(Cursor(), started)
        self._parts: list[str] = []
        self._reason: FinishReason | None = None
        self._number = 0

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ended; None: it has not."""
        return self._reason

    def begin(self) -> Iterator[Shape]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def of(self, event: GenerationEvent) -> Iterator[Shape]:
        """Yields what an event adds; none for tokens whose text is not certain yet."""
        for piece in self._pieces.of(event):
            match piece:
                case Opening():
                    item = shapes.message(self._generation_id, None, "in_progress")
                    yield self._event("response.output_item.added", output_index=0, item=item)
                    yield self._of_part("response.content_part.added", part=shapes.part(""))
                case Speech(_, said, _):
                    yield from self._spoken(said.content)
                case Ending(_, reason, _, said):
                    yield from self._spoken(said.content)
                    self._reason = reason

    def _spoken(self, text: str) -> Iterator[Shape]:
        if text:
            self._parts.append(text)
            yield self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self) -> Iterator[Shape]:
        """Yields what follows the last text. The response is then as it is stored."""
        reason = FinishReason.CANCELLED if self._reason is None else self._reason
        text = self.text
        self.response = shapes.ended(self.response, self._generation_id, text, reason, self._pieces.usage or Usage())
        (item,) = self.response["output"]
        yield self._of_part("response.output_text.done", text=text, logprobs=[])
        yield self._of_part("response.content_part.done", part=shapes.part(text))
        yield self._event("response.output_item.done", output_index=0, item=item)
        kind = "response.completed" if self.response["status"] == "completed" else "response.incomplete"
        yield self._event(kind, response=self.response)

    def fail(self, failure: HttpFailure) -> Iterator[Shape]:
        self.response = shapes.failed(self.response, failure.code or "server_error", failure.message)
        yield self._event("response.failed", response=self.response)

    def _of_part(self, kind: str, **fields: object) -> Shape:
        return self._event(kind, item_id=shapes.message_id(self._generation_id), output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> Shape:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


class ResponseWriter:
    """Frames the events of a response as server-sent events. `told` is the response so far."""

    def __init__(self, told: ResponseEvents) -> None:
        self._told = told

    def opening(self) -> bytes:
        return _framed(self._told.begin())

    def write(self, event: GenerationEvent) -> bytes:
        return _framed(self._told.of(event))

    def close(self) -> bytes:
        return _framed(self._told.end())

    def failed(self, failure: HttpFailure) -> bytes:
        return _framed(self._told.fail(failure))


def _framed(events: Iterator[Shape]) -> bytes:
    return b"".join(map(framed, events))


def framed(event: Shape) -> bytes:
    """Returns the bytes of a server-sent event."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
