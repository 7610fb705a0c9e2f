"""A call that a model writes as a JSON object: `{"name": ..., "arguments": {...}}`.

The keys may come in any order, and be those of other families: `parameters` for the arguments, an
object `function` around both. Arguments are passed on as they are written, while they are written,
once the name before them is known; where they come first they wait for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum

from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

_MAX_NAME_CHARS = 256
_NAMES = ("name", "function", "tool_name")
_KEYS = frozenset({*_NAMES, "arguments", "parameters", "type", "id", "tool_call_id"})
_STRING_RUN = re.compile(r'[^"\\]*')
# What is between two brackets, whole strings included. Possessive: nothing is tried twice.
_PLAIN_RUN = re.compile(r'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_SCALAR_END = re.compile(r"[,}\]\s]")


class Outcome(Enum):
    """What an object was."""

    CALL = "call"
    OTHER = "other"
    """A whole object, but no call of a function that may be called: its text is content."""
    BROKEN = "broken"
    """Not JSON, or not whole."""


class JsonCall:
    """Reads one object, from its opening brace. The source has a mark until the call begins."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self._source, self._sink = source, sink
        self._name: str | None = None
        self._waiting: str | None = None
        self._has_arguments = False
        self._begun = False

    def read(self) -> Step[Outcome]:
        """Returns what it was. After CALL the call is in the sink, whether or not it is whole."""
        whole = yield from self._members()
        if self._begun:
            return Outcome.CALL
        if not whole:
            return Outcome.BROKEN
        if not self._may_begin():
            return Outcome.OTHER
        self._begin()
        self._sink.arguments(self._waiting or "{}")
        return Outcome.CALL

    def read_arguments(self, name: str) -> Step[Outcome]:
        """Reads an object with the arguments alone, of the function of this name."""
        self._name = name
        if (yield from self._source.peek()) != "{":
            return Outcome.BROKEN
        whole = yield from self._arguments("{")
        return Outcome.CALL if self._begun else Outcome.OTHER if whole else Outcome.BROKEN

    def _may_begin(self) -> bool:
        return self._name is not None and self._sink.accepts(self._name)

    def _begin(self) -> None:
        assert self._name is not None
        self._begun = True
        self._source.unmark()
        self._sink.begin(self._name)

    def _members(self) -> Step[bool]:
        """Reads an object to its closing brace. False: it is broken, or no call."""
        source, first = self._source, True
        source.take()
        while True:
            yield from source.space()
            if (yield from source.literal("}")):
                return not first
            if not first:
                if not (yield from source.literal(",")):
                    return False
                yield from source.space()
            first = False
            key = yield from _string(source)
            if key is None or (key not in _KEYS and self._name is None) or source.overrun():
                return False
            yield from source.space()
            if not (yield from source.literal(":")):
                return False
            yield from source.space()
            if not (yield from self._member(key)):
                return False

    def _member(self, key: str) -> Step[bool]:
        kind = yield from self._source.peek()
        if key in _NAMES and kind == '"' and self._name is None:
            self._name = yield from _string(self._source)
            return self._name is not None
        if key == "function" and kind == "{":
            return (yield from self._members())
        if key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._arguments(kind))
        return (yield from _value(self._source, lambda text: None))

    def _arguments(self, kind: str) -> Step[bool]:
        if kind in ("{", "[") and self._may_begin():
            self._begin()
            return (yield from _value(self._source, self._sink.arguments))
        pieces: list[str] = []
        if not (yield from _value(self._source, pieces.append)):
            return False
        self._waiting = _unquoted("".join(pieces))
        return True


def _unquoted(text: str) -> str:
    """Returns arguments that the model wrote as a JSON string as what the string says; null is none.

    Half a surrogate pair, which the model escaped, becomes a question mark: no text may have it.
    """
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text, strict=False)).encode(errors="replace").decode()
    except ValueError:
        return text


def _string(source: Source) -> Step[str | None]:
    """Takes a short string and returns what it says. None: there is none here."""
    if not (yield from source.literal('"')):
        return None
    pieces: list[str] = []
    num_chars = 0
    while True:
        pieces.append(source.run(_STRING_RUN))
        num_chars += len(pieces[-1])
        if num_chars > _MAX_NAME_CHARS:
            source.take(_MAX_NAME_CHARS - num_chars)
            return None
        char = yield from source.peek()
        if char == '"':
            source.take()
            return _unescaped("".join(pieces))
        if char == "\\":
            source.take()
            char += yield from source.peek()
            source.take()
            pieces.append(char)
            num_chars += len(char)
        elif source.ended and not char:
            return None


def _unescaped(text: str) -> str | None:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return None


def _value(source: Source, take: Callable[[str], None]) -> Step[bool]:
    """Passes a JSON value on as it is written. False: it is not whole, or waits and is too long for that."""
    kind = yield from source.peek()
    if kind in ("{", "[", '"'):
        return (yield from _nested(source, take))
    text = yield from source.until(_SCALAR_END, _MAX_NAME_CHARS)
    take(text or "")
    return bool(text)


def _nested(source: Source, take: Callable[[str], None]) -> Step[bool]:
    """Passes on an object, a list or a string: up to where its brackets and quotation marks are even."""
    pieces = [(yield from source.peek())]
    source.take()
    in_string = pieces[0] == '"'
    depth = 0 if in_string else 1
    while True:
        pieces.append(source.run(_STRING_RUN if in_string else _PLAIN_RUN))
        if source.overrun():
            return False
        char = yield from _peek(source, pieces, take)
        if char == '"':
            in_string = not in_string
        elif in_string and char == "\\":  # with what it escapes, which may be a quotation mark
            source.take()
            char += yield from _peek(source, pieces, take)
        elif not in_string and char and char in "{}[]":
            depth += 1 if char in "{[" else -1
        elif char:
            continue
        source.take()
        pieces.append(char)
        if not char or (depth == 0 and not in_string):
            take("".join(pieces))
            return bool(char)


def _peek(source: Source, pieces: list[str], take: Callable[[str], None]) -> Step[str]:
    """Returns the next character; before it waits for one, it passes the pieces on."""
    if source.exhausted:
        take("".join(pieces))
        pieces.clear()
    return (yield from source.peek())
