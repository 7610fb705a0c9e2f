"""A call as Gemma writes it: `call:name{key:<escape>text<escape>,count:3}`, not JSON.

Its arguments are passed on as JSON when the call is complete.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ryzanstein.replies.calls.literals import WORDS, NoLiteral, past_comma, past_space
from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

_NAME = re.compile(r"\s*call:([A-Za-z0-9_.-]{1,64})\s*")
_KEY = re.compile(r"[^:{}\[\],]{1,256}")
_SCALAR = re.compile(r"[^{}\[\],]*")
_MAX_DEPTH = 32


def gemma_call(source: Source, sink: Sink, end: str, quote: str) -> Step[None]:
    """Reads what follows the marker that begins a call, and the marker that ends it. `quote` is around each text."""
    pattern = re.compile(re.escape(end))
    pieces: list[str] = []
    marker = ""
    while not marker:
        text, marker, ended = source.before((end,), pattern)
        pieces.append(text)
        if source.overrun() or (ended and not marker):
            sink.content(source.since_mark())
            return
        if not marker:
            yield
    try:
        name, arguments = _read("".join(pieces), quote)
    except NoLiteral:
        name, arguments = "", {}
    if not sink.accepts(name):
        sink.content(source.since_mark())
        return
    source.unmark()
    sink.begin(name)
    sink.arguments(json.dumps(arguments, ensure_ascii=False).encode(errors="replace").decode())


def _read(text: str, quote: str) -> tuple[str, Any]:
    found = _NAME.match(text)
    if found is None or not text.startswith("{", found.end()):
        raise NoLiteral
    arguments, end = _Values(text, quote).value(found.end(), 0)
    if text[end:].strip():
        raise NoLiteral
    return found[1], arguments


class _Values:
    """The values of one text."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote = text, quote

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if depth > _MAX_DEPTH:
            raise NoLiteral
        text, quote = self._text, self._quote
        if text.startswith(quote, at):
            end = text.find(quote, at + len(quote))
            if end < 0:
                raise NoLiteral
            return text[at + len(quote) : end], end + len(quote)
        if text.startswith("{", at):
            return self._object(at + 1, depth)
        if text.startswith("[", at):
            return self._list(at + 1, depth)
        found = _SCALAR.match(text, at)
        assert found is not None
        return _scalar(found[0].strip()), found.end()

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        text, members = self._text, dict[str, Any]()
        at = past_space(text, at)
        while not text.startswith("}", at):
            key = _KEY.match(text, at)
            if key is None or not text.startswith(":", key.end()):
                raise NoLiteral
            name = key[0].strip().removeprefix(self._quote).removesuffix(self._quote)
            members[name], at = self.value(past_space(text, key.end() + 1), depth + 1)
            at = past_comma(text, at, "}")
        return members, at + 1

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        text, values = self._text, list[Any]()
        at = past_space(text, at)
        while not text.startswith("]", at):
            value, at = self.value(at, depth + 1)
            values.append(value)
            at = past_comma(text, at, "]")
        return values, at + 1


def _scalar(text: str) -> Any:
    """Returns a number, true, false or null (also as Python writes them); another text is a string without quotation marks."""
    if not text:
        raise NoLiteral
    if text in WORDS:
        return WORDS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value
