"""The context of a gRPC call besides its message.

Request id, trace context, deadline, and what a disconnect means.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
from structlog.contextvars import get_contextvars

from ryzanstein import clock
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TENANT_ID, valid_tenant
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.router.core.peers import OWNER, WHOLE
from ryzanstein.router.faces.disconnect import OnDisconnect, on_disconnect
from ryzanstein.router.faces.request_key import keyed
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.interceptors import TRACEPARENT


@dataclass(frozen=True, slots=True)
class RpcCall:
    """A gRPC call.

    `traceparent` is that of the face's own span. `tenant` is as received, and may be empty.
    """

    request_id: str
    traceparent: str
    deadline: float | None
    on_disconnect: OnDisconnect
    owner_id: str = ""
    """In a call from another router: the owner that it addresses."""
    tenant: str = ""
    whole: bool = False
    """In a call from another router: its client sees nothing before the end."""

    @property
    def named_tenant(self) -> str:
        """The tenant that the caller names, empty if it names none. Raises INVALID_ARGUMENT, as `complete` does."""
        return valid_tenant(self.tenant, "")

    def complete(self, request: GenerationRequest, key: str) -> GenerationRequest:
        """Returns the request with this call's context. `key` is the message's own `request_id`.

        Raises INVALID_ARGUMENT when the key or the tenant's name is not valid.
        """
        completed = replace(
            request,
            request_id=self.request_id,
            traceparent=self.traceparent,
            deadline=self.deadline,
            tenant=valid_tenant(self.tenant, request.user),
            tenant_named=bool(self.tenant),
        )
        return keyed(completed, key, "request_id")


class Calls:
    """Opens calls, with a span and a count for each."""

    def __init__(self, telemetry: RouterTelemetry, tracing: Tracing) -> None:
        self._telemetry = telemetry
        self._tracing = tracing

    @contextmanager
    def call(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[RpcCall]:
        """Wraps a handler's work.

        It may be closed from another task, as a stream's is when its client disconnects.
        """
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        received = metadata.get(TRACEPARENT, "")
        span = self._tracing.start(f"ryzanstein.v1.{method}", received, **{"rpc.system": "grpc", "rpc.method": method})
        remaining_s = context.time_remaining()
        code = "OK"
        try:
            yield RpcCall(
                str(get_contextvars().get("request_id") or uuid.uuid4().hex),
                traceparent(span, received),
                None if remaining_s is None else clock.unix_s() + remaining_s,
                on_disconnect(metadata),
                metadata.get(OWNER, ""),
                metadata.get(TENANT_ID, ""),
                OWNER in metadata and metadata.get(WHOLE) == "true",
            )
        except RyzansteinError as error:
            code = error.code.name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except Exception:
            code = "INTERNAL"
            raise
        finally:
            self._telemetry.requests.labels("grpc", method, code).inc()
            span.set_attribute("rpc.grpc.status", code)
            span.end()
