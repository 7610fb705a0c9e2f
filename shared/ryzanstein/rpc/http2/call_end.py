"""How a call ended, as its client reads it from HTTP/2: trailers, resets, and answers of servers that are no gRPC servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import grpc

from ryzanstein.rpc.http2.frames import ErrorCode

MAX_DETAILS_CHARS = 512
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# gRPC over HTTP2, "HTTP2 Transport Mapping", and "HTTP to gRPC Status Code Mapping".
_OF_RESETS = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
_OF_HTTP = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    "429": grpc.StatusCode.UNAVAILABLE,
    "502": grpc.StatusCode.UNAVAILABLE,
    "503": grpc.StatusCode.UNAVAILABLE,
    "504": grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's status. `details` are for people."""

    code: grpc.StatusCode
    details: str = ""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"[:MAX_DETAILS_CHARS]


NO_STATUS = CallEnd(grpc.StatusCode.INTERNAL, "the answer ended without a status")
"""The end of a call whose server sent no trailers."""


class CallFailedError(Exception):
    """A call could not begin."""

    def __init__(self, end: CallEnd) -> None:
        super().__init__(str(end))
        self.end = end


def no_server(details: str) -> CallEnd:
    """Returns the end of a call whose connection there is not, or not any more."""
    return CallEnd(grpc.StatusCode.UNAVAILABLE, details)


def end_of_reset(number: int) -> CallEnd:
    """Returns the end of a call that the server reset with this error code."""
    code = ErrorCode(number) if number in ErrorCode._value2member_map_ else None
    name = f"code {number}" if code is None else code.name
    status = grpc.StatusCode.INTERNAL if code is None else _OF_RESETS.get(code, grpc.StatusCode.INTERNAL)
    return CallEnd(status, f"the stream was reset with {name}")


def end_of_headers(headers: Mapping[str, str], *, last: bool) -> CallEnd | None:
    """Returns the end that the headers or trailers of an answer state; None: the answer goes on.

    `last`: nothing follows these headers.
    """
    http = headers.get(":status", "200")
    if (number := headers.get("grpc-status", "") if last else "").isdecimal():
        code = _CODES.get(int(number[:4]), grpc.StatusCode.UNKNOWN)
        return CallEnd(code, unquote(headers.get("grpc-message", ""), errors="replace"))
    if http != "200":
        return CallEnd(_OF_HTTP.get(http, grpc.StatusCode.UNKNOWN), f"HTTP status {http[:8]}")
    if last:
        return NO_STATUS
    kind = headers.get("content-type", "application/grpc")
    if not kind.startswith("application/grpc"):
        return CallEnd(grpc.StatusCode.UNKNOWN, f"an answer of type {kind[:64]!r}")
    return None
