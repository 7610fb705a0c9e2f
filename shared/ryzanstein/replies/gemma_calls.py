"""A call as Gemma for functions writes it: `call:name{key:<escape>text<escape>,count:3}`, not JSON.

Its arguments are passed on as JSON when the call is complete.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

_END = "<end_function_call>"
_END_PATTERN = re.compile(re.escape(_END))
_QUOTE = "<escape>"
_NAME = re.compile(r"\s*call:([A-Za-z0-9_.-]{1,64})\s*")
_KEY = re.compile(r"[^:{}\[\],]{1,256}")
_SCALAR = re.compile(r"[^{}\[\],]*")
_SPACE = re.compile(r"\s*")
_MAX_DEPTH = 32


class _NoCall(Exception):
    """The text is not written like this."""


def gemma_call(source: Source, sink: Sink) -> Step[None]:
    """Reads what follows the marker that begins a call, and the marker that ends it."""
    pieces: list[str] = []
    marker = ""
    while not marker:
        text, marker, ended = source.before((_END,), _END_PATTERN)
        pieces.append(text)
        if source.overrun() or (ended and not marker):
            sink.content(source.since_mark())
            return
        if not marker:
            yield
    try:
        name, arguments = _read("".join(pieces))
    except _NoCall:
        name, arguments = "", {}
    if not sink.accepts(name):
        sink.content(source.since_mark())
        return
    source.unmark()
    sink.begin(name)
    sink.arguments(json.dumps(arguments, ensure_ascii=False).encode(errors="replace").decode())


def _read(text: str) -> tuple[str, Any]:
    found = _NAME.match(text)
    if found is None or not text.startswith("{", found.end()):
        raise _NoCall
    arguments, end = _value(text, found.end(), 0)
    if text[end:].strip():
        raise _NoCall
    return found[1], arguments


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise _NoCall
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise _NoCall
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    found = _SCALAR.match(text, at)
    assert found is not None
    return _scalar(found[0].strip()), found.end()


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = _past_space(text, at)
    while not text.startswith("}", at):
        key = _KEY.match(text, at)
        if key is None or not text.startswith(":", key.end()):
            raise _NoCall
        members[key[0].strip()], at = _value(text, _past_space(text, key.end() + 1), depth + 1)
        at = _past_comma(text, at, "}")
    return members, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _past_space(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        values.append(value)
        at = _past_comma(text, at, "]")
    return values, at + 1


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _past_comma(text: str, at: int, close: str) -> int:
    """Returns where the next value or the closing bracket is."""
    at = _past_space(text, at)
    if text.startswith(",", at):
        return _past_space(text, at + 1)
    if not text.startswith(close, at):
        raise _NoCall
    return at


def _scalar(text: str) -> Any:
    """Returns a number, true, false or null; another text is a string without its quotation marks."""
    if not text:
        raise _NoCall
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value
