"""Parses requests without raising.

grpc.aio answers an exception of a deserializer with UNKNOWN and a traceback. A request that cannot
be read therefore becomes an `UnreadableRequest`. The interceptor turns that into the call's status
before the servicer sees it; in the middle of a stream of requests the servicer's reader raises it.

The records of a serialized message are counted before it is parsed. The parser and the code after it
hold the event loop in proportion to the number of a message's parts, however few bytes each part has. A
record is one field on the wire (protobuf.dev/programming-guides/encoding), at any depth; 680 bytes of a
packed field also count as one, because numbers cost less. The count stops at its bound, so that it
costs at most that many iterations of one loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter
from pydantic import Field

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.times import check_times

MAX_RECORDS = 16_384
"""Enough for a request with 2,048 messages and full lists in its sampling parameters."""
RecordBound = Annotated[int, Field(ge=1024, le=2**20)]
PACKED_BYTES = 680
_LEAST_RECORD_BYTES = 2
_MAX_TAG = 2**32
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class MalformedError(ValueError):
    """The data is not a proto3 message."""


class TooManyRecordsError(ValueError):
    """There are more records than the bound.

    `field` is the outermost field in which this was found, or empty if the type does not have it.
    """

    def __init__(self, bound: int, field: str) -> None:
        super().__init__(f"more than {bound} records in {field!r}")
        self.bound = bound
        self.field = field


@dataclass(frozen=True, slots=True)
class RecordShape:
    """The contents of a message type's length-delimited fields, by their tag on the wire.

    They are messages or packed numbers. Missing fields are text or unknown, and count as one record
    each.
    """

    nested: dict[int, RecordShape]
    names: dict[int, str]


_PACKED: Final = RecordShape({}, {})


@cache
def shape_of(descriptor: Descriptor) -> RecordShape:
    """Returns the shape of a type that does not contain itself."""
    nested = {
        field.number << 3 | _DELIMITED: _PACKED if field.message_type is None else shape_of(field.message_type)
        for field in descriptor.fields
        if field.type not in _TEXTS
    }
    return RecordShape(nested, {field.number: field.name for field in descriptor.fields})


def check_records(data: bytes, shape: RecordShape, bound: int = MAX_RECORDS) -> None:
    """Raises TooManyRecordsError or MalformedError.

    Small messages are not checked: they have no room for that many records.
    """
    if len(data) <= _LEAST_RECORD_BYTES * bound:
        return
    try:
        tag = _scan(data, shape, bound)
    except IndexError:
        raise MalformedError from None
    if tag:
        raise TooManyRecordsError(bound, shape.names.get(tag >> 3, ""))


def _scan(data: bytes, shape: RecordShape, left: int) -> int:
    """Returns 0, or the tag of the outermost field in which more than `left` records were found.

    It is one flat loop because every other call waits for each of its iterations. Raises IndexError
    and MalformedError.
    """
    position, end, tag = 0, len(data), 0
    nested = shape.nested
    outer: list[tuple[int, dict[int, RecordShape], int]] = []
    while left > 0:
        left -= 1
        while position >= end:
            if position > end or not outer:
                return _over(position, end)
            end, nested, tag = outer.pop()
        tag = data[position]
        position += 1
        if tag & 7 != _DELIMITED or tag > 127:
            tag, position = _varint(data, position - 1)
            if tag & 7 != _DELIMITED:
                position = _skip(data, tag, position)
                continue
        length = data[position]
        position += 1
        if length > 127:
            length, position = _varint(data, position - 1)
        inner = nested.get(tag)
        if inner is None:
            position += length
        elif inner is _PACKED:
            position = _within(position + length, end)
            left -= length // PACKED_BYTES
        else:
            outer.append((end, nested, tag))
            end, nested = _within(position + length, end), inner.nested
    return 0 if position == len(data) and left >= 0 else outer[0][2] if outer else tag


def _over(position: int, end: int) -> int:
    if position > end:
        raise MalformedError
    return 0


def _within(inner_end: int, end: int) -> int:
    if inner_end > end:
        raise MalformedError
    return inner_end


def _skip(data: bytes, tag: int, position: int) -> int:
    """Returns where a record without a length ends. proto3 has no groups."""
    kind = tag & 7
    if kind == _VARINT:
        for end in range(position, position + _MAX_VARINT_BYTES):
            if data[end] < 0x80:
                return end + 1
        raise MalformedError
    if kind not in _FIXED_BYTES or tag >= _MAX_TAG:
        raise MalformedError
    return position + _FIXED_BYTES[kind]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number and where it ends."""
    value = 0
    for length in range(_MAX_VARINT_BYTES):
        byte = data[position + length]
        value |= (byte & 0x7F) << 7 * length
        if byte < 0x80:
            return value, position + length + 1
    raise MalformedError


Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class UnreadableRequest:
    """A placeholder for a request that cannot be read, with the reason."""

    error: RyzansteinError


def malformed_requests(service: str, registry: CollectorRegistry) -> Counter:
    """Returns the metric of one process. It has as many label values as there are methods."""
    return Counter(
        f"ryzanstein_{service}_malformed_requests_total",
        "gRPC requests refused because they could not be parsed or had too many records.",
        ["service", "method"],
        registry=registry,
    )


class RequestReading:
    """The parsing of one server's requests, of at most `max_records` records each (see `records`).

    Unreadable requests are counted in `malformed`.
    """

    def __init__(self, max_records: int = MAX_RECORDS, malformed: Counter | None = None) -> None:
        self._max_records = max_records
        self._malformed = malformed

    def deserializer(self, method: str, deserialize: Deserializer | None) -> Deserializer | None:
        """Returns a deserializer that never raises.

        `method` is `/package.Service/Method`, `deserialize` is a message class's FromString.
        """
        descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)
        if deserialize is None or descriptor is None:
            return deserialize

        def read(data: bytes) -> Any:
            try:
                return _read(data, deserialize, descriptor, self._max_records)
            except RyzansteinError as error:
                self._count(method)
                return UnreadableRequest(error)

        return read

    def _count(self, method: str) -> None:
        if self._malformed is not None:
            service, _, name = method.strip("/").rpartition("/")
            self._malformed.labels(service, name).inc()


def _read(data: bytes, deserialize: Deserializer, descriptor: Descriptor, max_records: int) -> Any:
    try:
        check_records(data, shape_of(descriptor), max_records)
        request = deserialize(data)
    except TooManyRecordsError as error:
        raise errors.too_many_records(error.bound, error.field) from None
    except (DecodeError, MalformedError):
        raise errors.malformed_message(descriptor.full_name) from None
    check_times(request)
    return request


def readable(request: Any) -> Any:
    """Returns the request. Raises the error of a request that could not be read."""
    if isinstance(request, UnreadableRequest):
        raise request.error
    return request


class ReadableRequests(AsyncIterator[Any]):
    """The requests of a stream, for its servicer. Raises at the first that could not be read."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    async def __anext__(self) -> Any:
        return readable(await anext(self._requests))
