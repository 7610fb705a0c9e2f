"""Names of enum values, for people."""

from __future__ import annotations

from typing import Any


def enum_name(enum: Any, number: int) -> str:
    """Returns a value's name for people, in lower case and without its enum's prefix.

    A value that only a newer peer knows is `unspecified`.
    """
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return str(enum.Name(number if number in enum.values() else 0)).removeprefix(prefix).lower()
