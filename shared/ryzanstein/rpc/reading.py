"""Parses requests without raising.

grpc.aio answers an exception of a deserializer with UNKNOWN and a traceback. A request that cannot
be read therefore becomes an `UnreadableRequest`. The interceptor turns that into the call's status
before the servicer sees it; in the middle of a stream of requests the servicer's reader raises it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.records import MAX_RECORDS, MalformedError, TooManyRecordsError, check_records, shape_of
from ryzanstein.rpc.times import check_times

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
