"""What a stream of the client yields. Texts are pieces: they are appended to what came before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.client.answer import Move
from ryzanstein.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Started:
    """A node has accepted the request. `prompt_tokens` includes the template."""

    generation_id: str
    model: str
    node: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a choice and the text that became certain with them, which may be empty."""

    choice: int
    node: str
    first_index: int
    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the assistant thinks."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """A piece of a call. The first of a call has its id and name."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The answer goes on at another node; nothing is lost."""

    move: Move


@dataclass(frozen=True, slots=True)
class Reattached:
    """The stream was lost, and goes on at this router."""

    router: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice has ended: stop, length, tool_calls or cancelled."""

    choice: int
    finish_reason: str
    usage: pb.Usage


Event = Started | Text | Reasoning | ToolPiece | Moved | Reattached | Ended
