"""Writes a whole answer as JSON, in pieces.

The encoder holds the interpreter for as long as one call takes. One call for a long answer would
stop the event loop, from whatever thread it is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

_AT_ONCE = 32
_encoded = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A list whose entries are large: each is made, written and forgotten before the next."""

    entries: Iterable[Any]


def written(body: dict[str, Any]) -> bytes:
    """Returns the body as JSON. An iterator in it is written as a list."""
    return b"".join(piece.encode("utf-8", "replace") for piece in _pieces(body))


def _pieces(value: Any) -> Iterator[str]:
    match value:
        case OneByOne(entries):
            yield "["
            yield from _joined(map(_pieces, entries))
            yield "]"
        case dict() if value:
            yield "{"
            yield from _joined(_member(name, entry) for name, entry in value.items())
            yield "}"
        case list() | Iterator():
            yield "["
            yield from _joined([_encoded(entries)[1:-1]] for entries in _slices(value))
            yield "]"
        case _:
            yield _encoded(value)


def _member(name: str, value: Any) -> Iterator[str]:
    yield f"{_encoded(name)}: "
    yield from _pieces(value)


def _joined(parts: Iterable[Iterable[str]]) -> Iterator[str]:
    for i, part in enumerate(parts):
        if i:
            yield ", "
        yield from part


def _slices(values: Iterable[Any]) -> Iterator[list[Any]]:
    remaining = iter(values)
    while entries := list(islice(remaining, _AT_ONCE)):
        yield entries
