"""Enums of the wire, which are open: newer peers send numbers that this process has no name for."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class OpenEnum(IntEnum):
    """Made of any number, like a proto3 enum: one that is not ours is `UNSPECIFIED`, which every subclass has as 0."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls(0) if isinstance(value, int) and value != 0 else None
