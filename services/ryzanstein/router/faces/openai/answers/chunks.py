"""What a chunk says: OpenAI's chunk objects, made from the events of a generation.

How a chunk is framed is left to the face that sends it: `stream` for server-sent events,
`faces.websocket` for messages.

Most chunks of a stream differ in their text alone, so the rest is encoded once for each choice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii
from typing import Any

from ryzanstein.generation.tokens import Delta, GenerationEvent, Started, Usage
from ryzanstein.replies.reader import ReplyDelta
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.dialect import AnswerDialect, omitted_body, usage_body
from ryzanstein.router.faces.openai.answers.pieces import Ending, Opening, Piece, Pieces, Speech

encoded: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes as `json.dumps` does, which makes an encoder for each call."""

_GAP = "\0text\0"


class PlainText:
    """The JSON of values that differ in one text: `value_of` returns the value of a choice with a text."""

    def __init__(self, value_of: Callable[[int, str], Any]) -> None:
        self._value_of = value_of
        self._around: dict[int, tuple[str, str]] = {}

    def encoded(self, choice: int, text: str) -> str:
        """Returns what `encoded` returns for the value."""
        around = self._around.get(choice)
        if around is None:
            # The last gap: what names the model comes before the choices, and may be any text.
            before, _, after = encoded(self._value_of(choice, _GAP)).rpartition(encode_basestring_ascii(_GAP))
            around = self._around[choice] = before, after
        return around[0] + encode_basestring_ascii(text) + around[1]


Chunk = dict[str, Any]


class Chunks:
    """Converts the events that one reader follows to chunks.

    When a chunk is yielded, `cursor` is the position of a reader that has it.
    """

    def __init__(
        self,
        started: Started,
        dialect: AnswerDialect,
        cursor: Cursor,
        include_usage: bool,
        *,
        continuous: bool = False,
        show_nodes: bool = False,
    ) -> None:
        """`continuous`: each chunk has the usage so far, as the reader has seen it.

        `show_nodes`: a choice's first chunk names its node, and so does the first one that another node wrote.
        """
        self.cursor = cursor
        self.nodes: dict[int, str] = {}
        """The node that wrote each choice's last tokens."""
        self._shown: dict[int, str] | None = {} if show_nodes else None
        self._continuous = include_usage and continuous
        self._started = started
        self._pieces = Pieces(cursor, started)
        self._dialect = dialect
        self._include_usage = include_usage
        self.envelope: Chunk = {
            "id": dialect.id_prefix + started.generation_id,
            "object": dialect.chunk_object,
            "created": started.created or int(time.time()),
            "model": started.model,
            "system_fingerprint": None,
        } | ({"usage": None} if include_usage else {})
        if started.omitted_prompt_tokens:  # also where the client asks for no usage
            self.envelope["prompt_tokens_details"] = omitted_body(started.omitted_prompt_tokens)
        self._plain = PlainText(lambda choice, text: self.envelope | {"choices": [dialect.delta(choice, ReplyDelta(text), ())]})

    @property
    def usage(self) -> Usage | None:
        """The usage of all choices, once one has ended."""
        return self._pieces.usage

    def of(self, event: GenerationEvent) -> Iterator[Chunk]:
        """Yields the chunks of an event, with one choice each."""
        self._note_node(event)
        for piece in self._pieces.of(event):
            if (choice := self._choice_of(piece)) is not None:
                yield self.envelope | {"choices": [choice]} | self._usage_so_far() | self._node(piece.choice)

    def json_of(self, event: GenerationEvent) -> Iterator[str]:
        """Yields the chunks that `of` yields, encoded."""
        self._note_node(event)
        for piece in self._pieces.of(event):
            node = self._node(piece.choice)
            if isinstance(piece, Speech) and not piece.rows and piece.delta.only_content and not self._continuous and not node:
                yield self._plain.encoded(piece.choice, piece.delta.content)
            elif (choice := self._choice_of(piece)) is not None:
                yield encoded(self.envelope | {"choices": [choice]} | self._usage_so_far() | node)

    def last(self) -> Iterator[Chunk]:
        """Yields what follows when all choices have ended: the usage, where the client asked for it."""
        if self._include_usage and self._pieces.usage is not None:
            yield self.envelope | {"choices": [], "usage": usage_body(self._pieces.usage)}

    def _note_node(self, event: GenerationEvent) -> None:
        if isinstance(event, Delta):
            self.nodes[event.choice] = event.node_id

    def _node(self, choice: int) -> Chunk:
        """Returns what names the node of a choice, where it has not been named before."""
        node = self.nodes.get(choice)
        if self._shown is None or node is None or self._shown.get(choice) == node:
            return {}
        self._shown[choice] = node
        return {"node": node}

    def _usage_so_far(self) -> Chunk:
        if not self._continuous:
            return {}
        num_tokens = sum(self.cursor.from_index.values())
        return {"usage": usage_body(Usage(self._started.prompt_tokens, num_tokens, 0, self._started.omitted_prompt_tokens))}

    def _choice_of(self, piece: Piece) -> dict[str, Any] | None:
        match piece:
            case Opening(choice):
                return self._dialect.opening(choice)
            case Speech(choice, reply, rows):
                return self._dialect.delta(choice, reply, rows)
            case Ending(choice, reason, rows, reply):
                return self._dialect.ending(choice, reason, rows, reply)
