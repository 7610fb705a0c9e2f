"""Sizes as users write them: `8KiB`, `2KiB,1MiB`, `2KiB..64MiB` (each twice the one before)."""

from __future__ import annotations

import re
from itertools import takewhile
from types import MappingProxyType

from ryzanstein import errors

MAX_BYTES = 2**30
_UNITS = MappingProxyType({"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30})
_SIZE = re.compile(r"(\d{1,10})\s*(B|KiB|MiB|GiB)?")


def parse_sizes(text: str) -> tuple[int, ...]:
    """Returns the sizes in bytes, ascending, each once.

    Raises INVALID_ARGUMENT for what is not a size, or not within 1 byte and 1 GiB.
    """
    sizes = {size for part in text.split(",") for size in _range(part)}
    return tuple(sorted(sizes))


def show_size(num_bytes: int) -> str:
    """Returns the size in the largest unit that divides it."""
    unit = next(name for name, factor in reversed(tuple(_UNITS.items())) if num_bytes % factor == 0 and name)
    return f"{num_bytes // _UNITS[unit]} {unit}"


def _range(text: str) -> list[int]:
    first, separator, last = text.partition("..")
    if not separator:
        return [_size(first)]
    low, high = _size(first), _size(last)
    if low > high:
        raise errors.invalid("sizes", "a range must ascend", text)
    return list(takewhile(lambda size: size <= high, (low << doubling for doubling in range(MAX_BYTES.bit_length()))))


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise errors.invalid("sizes", "must be like 8KiB, 2KiB,1MiB or 2KiB..64MiB", text)
    num_bytes = int(match[1]) * _UNITS[match[2] or ""]
    if not 1 <= num_bytes <= MAX_BYTES:
        raise errors.invalid("sizes", f"must be 1 to {MAX_BYTES} bytes", num_bytes)
    return num_bytes
