"""The memory that messages of many connections share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Room:
    """The memory for all bodies that arrive, or for all that leave. `taken` and `bound` are in bytes."""

    bound: int
    taken: int = 0
