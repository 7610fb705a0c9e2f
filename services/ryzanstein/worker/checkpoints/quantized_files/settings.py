"""Values of `quantization_config` that several formats have."""

from __future__ import annotations

from typing import TypeVar

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import excerpt

_Value = TypeVar("_Value", int, str, bool)


def one_of(settings: Values, key: str, known: tuple[_Value, ...], default: _Value | None = None) -> _Value:
    """Returns a value that is one of those known. Raises CheckpointError."""
    value = settings.optional(key)
    value = default if value is None else value
    for each in known:
        if value == each and type(value) is type(each):
            return each
    raise settings.error(key, f"{excerpt(value)} is not supported, only {', '.join(map(repr, known))}")


def group_size(settings: Values) -> int | None:
    """Returns the inputs of a group, or None if all inputs are one group. Raises CheckpointError."""
    return None if settings.optional("group_size") == -1 else settings.count("group_size", 128)
