"""From bytes to a request, without an exception: grpc.aio answers one that escapes a deserializer with UNKNOWN and a traceback.

What cannot be read becomes an `UnreadableRequest` in the request's place. The interceptor turns it into the call's status,
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
    """In place of a request: why it is none."""

    error: RyzansteinError


def malformed_requests(service: str, registry: CollectorRegistry) -> Counter:
    """The metric of one process. There are as many labels as methods."""
    return Counter(
        f"ryzanstein_{service}_malformed_requests_total",
        "gRPC requests that are no messages of their type, or of more parts than allowed.",
        ["service", "method"],
        registry=registry,
    )


class RequestReading:
    """How the requests of one server are read: at most `max_records` records each (see `records`), counted in `malformed`."""

    def __init__(self, max_records: int = MAX_RECORDS, malformed: Counter | None = None) -> None:
        self._max_records = max_records
        self._malformed = malformed

    def deserializer(self, method: str, deserialize: Deserializer | None) -> Deserializer | None:
        """Never raises. `method` is `/package.Service/Method`, `deserialize` a message class's FromString."""
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
    """The request itself. Raises the error of one that could not be read."""
    if isinstance(request, UnreadableRequest):
        raise request.error
    return request


class ReadableRequests(AsyncIterator[Any]):
    """The requests of a stream, as its servicer takes them: raises at the first that could not be read."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    async def __anext__(self) -> Any:
        return readable(await anext(self._requests))
