"""Values as Python writes them (`True`, `'text'`, `{'a': 1}`), as JSON. JSON's own words are read too.

Models quote texts without care: a quotation mark ends a text only where something that may follow a
text stands behind it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_SCALAR = re.compile(r"[^\s,:()\[\]{}'\"]+")
_SPACE = re.compile(r"\s*")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
FOLLOWS = ",)]}:"
"""What may stand behind a text."""
MAX_DEPTH = 32


class NoLiteral(Exception):
    """The text is none."""


def as_json(text: str) -> str | None:
    """Returns a literal as JSON; None: it is none."""
    try:
        return dumped(literal(text))
    except NoLiteral:
        return None


def dumped(value: Any) -> str:
    """Returns a value as JSON that can be sent: half a surrogate pair becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


def literal(text: str) -> Any:
    """Returns the value of a literal. Raises NoLiteral."""
    value, end = _value(text, past_space(text, 0), 0)
    if past_space(text, end) != len(text):
        raise NoLiteral
    return value


def escaped(code: str) -> str | None:
    """Returns what a backslash with these characters behind it says; None: more of them belong to it."""
    kind = code[:1]
    if kind not in _CODES:
        return None if not code else _ESCAPED.get(kind, "\\" + kind)
    if len(code) <= _CODES[kind]:
        return None
    try:
        return chr(int(code[1:], 16))
    except (ValueError, OverflowError):
        return "\\" + code


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise NoLiteral
    first = text[at : at + 1]
    if first in ("'", '"'):
        return _text(text, at)
    if first == "{":
        return _members(text, at + 1, depth)
    if first in ("[", "("):
        return _items(text, at + 1, depth, _CLOSING[first])
    found = _SCALAR.match(text, at)
    if found is None:
        raise NoLiteral
    return _scalar(found[0]), found.end()


def _scalar(text: str) -> Any:
    if text in WORDS:
        return WORDS[text]
    try:
        value = json.loads(text.replace("_", "") if text[:1].isdigit() else text)
    except (ValueError, RecursionError):
        raise NoLiteral from None
    if isinstance(value, float) and not math.isfinite(value):
        raise NoLiteral
    return value


def _text(text: str, at: int) -> tuple[str, int]:
    quote, at = text[at], at + 1
    pieces: list[str] = []
    while at < len(text):
        char = text[at]
        at += 1
        if char == quote and _ends(text, at):
            return "".join(pieces), at
        if char == "\\":
            char, at = _escape(text, at)
        pieces.append(char)
    raise NoLiteral


def _escape(text: str, at: int) -> tuple[str, int]:
    for end in range(at + 1, min(at + 9, len(text)) + 1):
        if (said := escaped(text[at:end])) is not None:
            return said, end
    return "\\", at


def _ends(text: str, at: int) -> bool:
    behind = text[past_space(text, at) :][:1]
    return not behind or behind in FOLLOWS


def _members(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = past_space(text, at)
    while not text.startswith("}", at):
        key, at = _value(text, at, depth + 1)
        at = past_space(text, at)
        if not text.startswith(":", at) or isinstance(key, (list, dict)):
            raise NoLiteral
        name = key if isinstance(key, str) else json.dumps(key)
        members[name], at = _value(text, past_space(text, at + 1), depth + 1)
        at = past_comma(text, at, "}")
    return members, at + 1


def _items(text: str, at: int, depth: int, close: str) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = past_space(text, at)
    while not text.startswith(close, at):
        item, at = _value(text, at, depth + 1)
        items.append(item)
        at = past_comma(text, at, close)
    return items, at + 1


def past_comma(text: str, at: int, close: str) -> int:
    """Returns where the next value or the closing bracket is. Raises NoLiteral."""
    at = past_space(text, at)
    if text.startswith(",", at):
        return past_space(text, at + 1)
    if not text.startswith(close, at):
        raise NoLiteral
    return at


def past_space(text: str, at: int) -> int:
    """Returns where the white space that begins at `at` ends."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
