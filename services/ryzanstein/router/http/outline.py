"""How much is in a JSON body, seen from its punctuation before anything of it is built.

The parser is quick, but what it builds of a million small things holds the event loop. Brackets, commas and quotation marks are
counted at the speed of a memory copy. What is not valid JSON may be counted wrongly; the parser stops at its first error.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_TEXTS = 65_536
"""Keys and values that are strings."""
MAX_LISTS = 65_536
"""Objects and arrays."""
MAX_VALUES = 262_144
"""Members of objects and arrays, so numbers as well: token ids."""
_SMALL_BYTES = 65_536  # too little for any harm

# What a body has many of.
_FIELDS = ("messages", "prompt", "stop", "stop_token_ids", "logit_bias", "tools", "functions", "metadata")


class Excess(NamedTuple):
    """Too many of something. `field`: which part of the body is the largest, "body" if it is none that can be."""

    field: str
    what: str
    bound: int


def excess_of(body: bytes) -> Excess | None:
    """The first bound that the body breaks."""
    if len(body) <= _SMALL_BYTES:
        return None
    bare = _without_escapes(body)
    if bare.count(b'"') > 2 * MAX_TEXTS:
        return Excess(_largest_field(body), "strings in the whole body, keys included", MAX_TEXTS)
    outside = b"".join(bare.split(b'"')[::2])
    if outside.count(b"{") + outside.count(b"[") > MAX_LISTS:
        return Excess(_largest_field(body), "objects and arrays in the whole body", MAX_LISTS)
    if outside.count(b",") >= MAX_VALUES:
        return Excess(_largest_field(body), "values in the whole body", MAX_VALUES)
    return None


def _without_escapes(body: bytes) -> bytes:
    """The quotation marks that are left begin or end a string."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body


def _largest_field(body: bytes) -> str:
    """The one after whose name the most bytes come before the next one's."""
    begins = sorted((body.find(b'"%s"' % name.encode()), name) for name in _FIELDS)
    found = [(at, name) for at, name in begins if at >= 0]
    ends = [*[at for at, _ in found][1:], len(body)]
    return max(((end - at, name) for (at, name), end in zip(found, ends, strict=False)), default=(0, "body"))[1]
