"""Counts the parts of a JSON body by its punctuation, before anything of it is built.

The parser is quick, but building a million small objects blocks the event loop. Brackets, commas
and quotation marks are counted at the speed of a few memory copies, a piece at a time. Invalid JSON
may be counted wrongly; the parser stops at its first error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_TEXTS = 32_768
"""Keys and values that are strings."""
MAX_LISTS = 32_768
"""Objects and arrays."""
MAX_VALUES = 131_072
"""Members of objects and arrays, including numbers such as token ids."""
_SMALL_BYTES = 65_536
"""A body up to this size is too small to do harm."""
_PIECE_BYTES = 262_144

# Fields of which a body may have many entries.
_FIELDS = (
    *("messages", "prompt", "input", "tokens", "stop", "stop_token_ids", "logit_bias", "tools", "functions", "metadata"),
    *("response_format", "structured_outputs", "guided_json", "guided_choice"),
)


def _all_but(kept: bytes) -> bytes:
    return bytes(byte for byte in range(256) if byte not in kept)


_NO_QUOTE = _all_but(b'"')
_NO_PUNCTUATION = _all_but(b",[{")


class Excess(NamedTuple):
    """A bound that a body breaks.

    `field` is the largest field of the part that was counted, or "body" if there is none that can
    be large.
    """

    field: str
    what: str
    bound: int


def excesses(body: bytes) -> Iterator[Excess | None]:
    """Yields None after each piece, or the first bound that the body breaks and then stops."""
    if len(body) <= _SMALL_BYTES:
        return
    outline, end = Outline(), 0
    while end < len(body):
        begin, end = end, _end_of_piece(body, end)
        broken = outline.add(body[begin:end])
        yield None if broken is None else Excess(_largest_field(body, end), *broken)
        if broken is not None:
            return


class Outline:
    """Counts the pieces of one body.

    A piece never ends between a backslash and what it escapes.
    """

    def __init__(self) -> None:
        self._quotes = self._lists = self._values = 0

    def add(self, piece: bytes) -> tuple[str, int] | None:
        """Counts a piece. Returns the bound that is broken now, if any."""
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        inside = self._quotes % 2
        self._quotes += len(bare.translate(None, _NO_QUOTE))
        if self._quotes > 2 * MAX_TEXTS:
            return "strings, including keys", MAX_TEXTS
        punctuation = b"".join(bare.split(b'"')[inside::2]).translate(None, _NO_PUNCTUATION)
        commas = len(punctuation) - len(punctuation.translate(None, b","))
        self._lists += len(punctuation) - commas
        self._values += commas
        if self._lists > MAX_LISTS:
            return "objects and arrays", MAX_LISTS
        if self._values >= MAX_VALUES:
            return "values", MAX_VALUES
        return None


def _end_of_piece(body: bytes, begin: int) -> int:
    end = begin + _PIECE_BYTES
    piece = body[begin:end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end + num_backslashes % 2


def _largest_field(body: bytes, end: int) -> str:
    """Returns the field with the most bytes between its name and the next field's, before `end`."""
    begins = sorted((body.find(b'"%s"' % name.encode(), 0, end), name) for name in _FIELDS)
    found = [(at, name) for at, name in begins if at >= 0]
    ends = [*[at for at, _ in found][1:], end]
    return max(((stop - at, name) for (at, name), stop in zip(found, ends, strict=False)), default=(0, "body"))[1]
