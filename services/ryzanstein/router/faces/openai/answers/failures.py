"""Errors in OpenAI's form: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from ryzanstein.errors import CONTEXT_TOO_LONG, Code, RyzansteinError, internal

CLIENT_CLOSED_REQUEST = 499

_STATUS = MappingProxyType(
    {
        Code.CANCELLED: CLIENT_CLOSED_REQUEST,
        Code.INVALID_ARGUMENT: 400,
        Code.DEADLINE_EXCEEDED: 504,
        Code.NOT_FOUND: 404,
        Code.ALREADY_EXISTS: 409,
        Code.PERMISSION_DENIED: 403,
        Code.RESOURCE_EXHAUSTED: 429,
        Code.FAILED_PRECONDITION: 400,
        Code.ABORTED: 409,
        Code.OUT_OF_RANGE: 400,
        Code.UNIMPLEMENTED: 501,
        Code.UNAVAILABLE: 503,
        Code.UNAUTHENTICATED: 401,
    }
)
# Where one gRPC status is several HTTP ones: draft-ietf-httpapi-idempotency-key-header, 2.7.
_STATUS_OF_REASON = MappingProxyType({"IDEMPOTENCY_MISMATCH": 422})
_TYPES = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 499: "request_cancelled"}
)
# Codes that OpenAI clients check for.
_CODES = MappingProxyType(
    {
        "CONTEXT_TOO_LONG": "context_length_exceeded",
        "RATE_LIMITED": "rate_limit_exceeded",
        "QUOTA_EXHAUSTED": "insufficient_quota",
        "KEY_MISSING": "missing_api_key",
        "KEY_INVALID": "invalid_api_key",
    }
)
# RFC 9110, 11.6.1.
_CHALLENGE = MappingProxyType({"WWW-Authenticate": "Bearer"})
# Why input was refused before it became a request, as in `ryzanstein_router_http_refused_total`.
TOO_LARGE = "too_large"
MALFORMED = "malformed"
TIMEOUT = "timeout"
CONNECTIONS = "connections"
MEMORY = "memory"
ORIGIN = "origin"
ACCESS = "access"
HOST = "host"


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """An error in its HTTP form.

    `metadata` is what gRPC has in ErrorInfo, besides the field, which is `param`. It is left out of
    the body where there is none.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, **({"metadata": dict(self.metadata)} if self.metadata else {})}}

    def response(self) -> Response:
        # Escaped to ASCII: a message may quote half a surrogate pair, which UTF-8 cannot encode.
        content = json.dumps(self.body).encode()
        return Response(content, self.status, dict(self.headers), "application/json")


class HttpRefused(Exception):
    """The request is refused for its form, and nothing of it reached the domain.

    `reason` is one of the constants above.
    """

    def __init__(self, failure: HttpFailure, reason: str) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.reason = reason


def failure_from_error(error: RyzansteinError) -> HttpFailure:
    """Maps an error as in docs/reference/errors.md, with Retry-After where it says when to retry."""
    error = error.with_fields(_client_field)
    headers = dict(_CHALLENGE) if error.code is Code.UNAUTHENTICATED else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        # Finer than whole seconds; OpenAI clients prefer it.
        headers["Retry-After-Ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.reason == "QUOTA_EXHAUSTED":
        # OpenAI's clients try every 429 again that does not say so.
        headers["x-should-retry"] = "false"
    return HttpFailure(
        status=_STATUS_OF_REASON.get(error.reason) or _STATUS.get(error.code, 500),
        message=error.message,
        param=_param(error),
        code=_CODES.get(error.reason, error.reason.lower()),
        headers=headers,
        metadata={name: value for name, value in error.metadata.items() if name != "field"},
    )


def failure_from_exception(error: Exception, request_id: str) -> HttpFailure:
    """Returns the failure that a client gets for any error. For a bug it has only the request's id."""
    match error:
        case HttpRefused():
            return error.failure
        case RyzansteinError():
            return failure_from_error(error)
    return failure_from_error(internal(f"internal error, request {request_id}"))


def _client_field(field: str) -> str:
    """Returns the name of a field in bodies, where the face knows no better one."""
    name = field.removeprefix("sampling.")
    return "response_format" if name.partition(".")[0] == "constraint" else name


def _param(error: RyzansteinError) -> str | None:
    """Returns the field that is wrong, as the client spelled it."""
    if error.reason == CONTEXT_TOO_LONG and not any(each.field.startswith("input[") for each in error.violations):
        return "messages"  # as OpenAI says it; of texts for embeddings, the one that is too long
    if error.violations:
        return error.violations[0].field
    return "model" if error.resource is not None and error.resource[0] == "model" else None
