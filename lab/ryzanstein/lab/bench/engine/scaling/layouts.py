"""The layouts that the scaling benchmark compares: how many ranks with how many threads each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.worker.collectives.segment import MAX_RANKS

_LAYOUT = re.compile(r"(\d{1,2})x(\d{1,3})(:pin)?")


@dataclass(frozen=True, slots=True)
class RankLayout:
    """A layout. `threads` is per rank. `pinned`: each rank has separate cores."""

    ranks: int
    threads: int
    pinned: bool = False

    def __str__(self) -> str:
        return f"{self.ranks}x{self.threads}" + (":pin" if self.pinned else "")


def parse_layouts(text: str) -> tuple[RankLayout, ...]:
    """Parses `1x1,2x1:pin`; each once.

    Raises INVALID_ARGUMENT for what is not a layout, or has no ranks or threads.
    """
    return tuple(dict.fromkeys(_layout(part.strip()) for part in text.split(",")))


def _layout(text: str) -> RankLayout:
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise errors.invalid("layouts", "must be like 1x1,2x1:pin, ranks x threads per rank", text)
    layout = RankLayout(int(match[1]), int(match[2]), match[3] is not None)
    if not 1 <= layout.ranks <= MAX_RANKS or layout.threads < 1:
        raise errors.invalid("layouts", f"must have 1 to {MAX_RANKS} ranks and at least one thread", text)
    return layout
