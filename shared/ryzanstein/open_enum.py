"""Open enums of the wire: newer peers send numbers that this process does not know."""

from __future__ import annotations

from enum import IntEnum
from typing import Self


class OpenEnum(IntEnum):
    """An enum that accepts any number, like a proto3 enum.

    An unknown number becomes `UNSPECIFIED`, which every subclass has as 0.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls(0) if isinstance(value, int) and value != 0 else None
