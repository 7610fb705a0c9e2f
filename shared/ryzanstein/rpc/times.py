"""Checks that the times in a request are valid.

google.protobuf's Timestamp and Duration can hold numbers that are not valid times. Computing with
them would fail in code that knows nothing of the request.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ryzanstein import errors

# From the comments of timestamp.proto and duration.proto: the years 1 to 9999, and 10,000 years.
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799
_LONGEST_S = 315_576_000_000
_NANOS = 999_999_999


@cache
def time_fields(descriptor: Descriptor) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of all times in a type that does not contain itself.

    Times in its singular messages are included.
    """
    found: list[tuple[str, ...]] = []
    for field in descriptor.fields:
        if field.message_type is None or field.is_repeated:
            continue
        if field.message_type.full_name in (Timestamp.DESCRIPTOR.full_name, Duration.DESCRIPTOR.full_name):
            found.append((field.name,))
        else:
            found += [(field.name, *path) for path in time_fields(field.message_type)]
    return tuple(found)


def check_times(message: Message) -> None:
    """Raises INVALID_ARGUMENT, which names the field and its bounds, for an invalid time."""
    for path in time_fields(message.DESCRIPTOR):
        value = _at(message, path)
        if value is not None:
            _check(value, ".".join(path))


def _at(message: Any, path: tuple[str, ...]) -> Any:
    """Returns the value at a path, or None if it is absent."""
    for name in path:
        if not message.HasField(name):
            return None
        message = getattr(message, name)
    return message


def _check(value: Any, field: str) -> None:
    if isinstance(value, Timestamp):
        if not _FIRST_S <= value.seconds <= _LAST_S or not 0 <= value.nanos <= _NANOS:
            raise errors.invalid(field, f"must be in the years 1 to 9999, with nanos in [0, {_NANOS}]")
    elif abs(value.seconds) > _LONGEST_S or abs(value.nanos) > _NANOS or value.seconds * value.nanos < 0:
        description = f"must be in [-{_LONGEST_S}, {_LONGEST_S}] seconds, with nanos of the same sign in [-{_NANOS}, {_NANOS}]"
        raise errors.invalid(field, description)
