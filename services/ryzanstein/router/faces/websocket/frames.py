"""The messages of the subprotocol `ryzanstein.v1`: JSON objects with a `type`.

docs/build/asyncapi.yaml describes them; a test holds both against each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from ryzanstein.generation.request import MAX_CHOICES
from ryzanstein.router.faces.openai.answers.chunks import Chunk
from ryzanstein.router.faces.openai.answers.failures import HttpFailure
from ryzanstein.router.faces.openai.requests.schemas import Body
from ryzanstein.router.faces.websocket.limits import MAX_CREDIT

MAX_HEADERS = 16
MAX_HEADER_CHARS = 1024

StreamId = Annotated[str, Meta(min_length=1, max_length=64)]
GenerationId = Annotated[str, Meta(min_length=1, max_length=128)]
_Choice = Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
_Index = Annotated[int, Meta(ge=0, le=10**9)]
_Chunks = Annotated[int, Meta(ge=0, le=MAX_CREDIT)]
_HeaderValue = Annotated[str, Meta(max_length=MAX_HEADER_CHARS, pattern=r"^[\x20-\x7e]*\Z")]


class Submit(Body, frozen=True, tag_field="type", tag="submit", kw_only=True):
    """Begins a generation: what a POST of `body` to `url` with `headers` begins."""

    id: StreamId
    url: str
    body: Raw
    headers: Annotated[dict[str, _HeaderValue], Meta(max_length=MAX_HEADERS)] = msgspec.field(default_factory=dict)
    credit: _Chunks | None = None


class Attach(Body, frozen=True, tag_field="type", tag="attach", kw_only=True):
    """Reads a generation from these indices on, without the choices that the client has seen end."""

    id: StreamId
    generation: GenerationId
    from_index: Annotated[dict[_Choice, _Index], Meta(max_length=MAX_CHOICES)] = msgspec.field(default_factory=dict)
    ended: Annotated[list[_Choice], Meta(max_length=MAX_CHOICES)] = msgspec.field(default_factory=list)
    include_usage: bool | None = None
    credit: _Chunks | None = None


class Cancel(Body, frozen=True, tag_field="type", tag="cancel", kw_only=True):
    """Cancels the generation of a stream of this socket, or any other: exactly one is given."""

    id: StreamId | None = None
    generation: GenerationId | None = None


class CreditFrame(Body, frozen=True, tag_field="type", tag="credit", kw_only=True):
    """Lets a stream send so many more chunks."""

    id: StreamId
    chunks: Annotated[int, Meta(ge=1, le=MAX_CREDIT)]


ClientFrame = Submit | Attach | Cancel | CreditFrame


class Accepted(msgspec.Struct, frozen=True, tag_field="type", tag="accepted"):
    """The generation is admitted. Its id is valid at every router from now on."""

    id: str
    generation: str
    request_id: str


class StartedFrame(msgspec.Struct, frozen=True, tag_field="type", tag="started"):
    """A node runs the generation."""

    id: str
    generation: str
    model: str
    node: str


class ChunkFrame(msgspec.Struct, frozen=True, tag_field="type", tag="chunk", omit_defaults=True):
    """A chunk, as a server-sent event has it.

    `index` is where the reader of the choice stands after it; `ended` says that nothing more comes
    of the choice. `node` wrote its last tokens. The chunk of the usage belongs to no choice.
    """

    id: str
    choice: int | None
    index: int | None
    ended: bool
    chunk: Chunk
    node: str = ""


class Done(msgspec.Struct, frozen=True, tag_field="type", tag="done"):
    """The stream is complete."""

    id: str
    generation: str


class Cancelled(msgspec.Struct, frozen=True, tag_field="type", tag="cancelled"):
    """The generation is cancelled. Its streams end with `finish_reason` "cancelled", and `done`."""

    generation: str


class Draining(msgspec.Struct, frozen=True, tag_field="type", tag="draining"):
    """The router stops. Open streams may still end; new ones are refused: use another router."""

    retry_after_ms: int


class ErrorFrame(msgspec.Struct, frozen=True, tag_field="type", tag="error", omit_defaults=True):
    """A request failed, or the stream with this id: nothing more comes of it.

    `status` and `error` are those of an HTTP answer. Without an id no stream ends: a cancel of
    `generation` failed, a message was no request, or its id is in use.
    """

    status: int
    error: Mapping[str, Any]
    id: str | None = None
    generation: str | None = None
    retry_after_ms: int | None = None


ServerFrame = Accepted | StartedFrame | ChunkFrame | Done | Cancelled | Draining | ErrorFrame

_encoder = msgspec.json.Encoder()


def encoded(frame: ServerFrame) -> bytes:
    """Returns the text of a message.

    A text that quotes half a surrogate pair, which UTF-8 cannot encode, is escaped to ASCII.
    """
    try:
        return _encoder.encode(frame)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(frame)).encode()


def error_frame(failure: HttpFailure, stream_id: str | None = None, generation: str | None = None) -> ErrorFrame:
    after_ms = failure.headers.get("Retry-After-Ms")
    error = failure.body["error"]
    return ErrorFrame(failure.status, error, stream_id, generation, int(after_ms) if after_ms else None)
