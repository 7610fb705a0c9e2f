"""The context of a gRPC call besides its message.

Request id, trace context, deadline, and what a disconnect means.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.trace import SpanKind
from structlog.contextvars import get_contextvars

from ryzanstein import clock
from ryzanstein.auth.caller import Caller
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TENANT_ID, valid_tenant
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.request_id import random_id
from ryzanstein.router.core.peers import OWNER, WHOLE
from ryzanstein.router.faces.disconnect import OnDisconnect, on_disconnect
from ryzanstein.router.faces.origin import RequestOrigin
from ryzanstein.router.faces.request_key import keyed
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.guard import caller
from ryzanstein.rpc.interceptors import TRACEPARENT

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class RpcCall:
    """A gRPC call. `traceparent` is that of the face's own span."""

    origin: RequestOrigin
    traceparent: str
    deadline: float | None
    on_disconnect: OnDisconnect

    @property
    def caller(self) -> Caller:
        return self.origin.caller

    @property
    def tenant(self) -> str:
        """The tenant of the caller, empty if it names none."""
        return self.origin.caller.tenant

    @property
    def request_id(self) -> str:
        return self.origin.request_id

    def complete(self, request: GenerationRequest, key: str) -> GenerationRequest:
        """Returns the request with this call's context. `key` is the message's own `request_id`.

        Raises INVALID_ARGUMENT when the key is not valid, and what `RequestOrigin.owned` raises.
        """
        return keyed(self.origin.owned(request, self.traceparent, self.deadline), key, "request_id")


@dataclass(frozen=True, slots=True)
class PeerCall:
    """A call of another router, which addresses the owner with this id.

    It relays a client of this tenant, empty if its client names none. `whole`: that one sees nothing
    before the end.
    """

    owner_id: str
    tenant: str
    whole: bool


class Calls:
    """Opens calls, with a span and a count for each."""

    def __init__(
        self,
        telemetry: RouterTelemetry,
        tracing: Tracing,
        limits_shown: Callable[[str], Mapping[str, str]] = lambda tenant: {},
    ) -> None:
        self._limits_shown = limits_shown
        self._telemetry = telemetry
        self._tracing = tracing

    @contextmanager
    def call(self, method: str, context: _Context) -> Iterator[RpcCall]:
        """Wraps the work of a public handler, whose caller the server's guard let in."""
        with self._measured(method, context) as (metadata, parent):
            remaining_s = context.time_remaining()
            deadline = None if remaining_s is None else clock.unix_s() + remaining_s
            request_id = str(get_contextvars().get("request_id") or random_id())
            who = caller()
            try:
                yield RpcCall(RequestOrigin(who, request_id), parent, deadline, on_disconnect(metadata))
            finally:
                if shown := self._limits_shown(who.tenant):
                    context.set_trailing_metadata(tuple(shown.items()))

    @contextmanager
    def peer_call(self, method: str, context: _Context) -> Iterator[PeerCall]:
        """Wraps the work of a handler for other routers."""
        with self._measured(method, context) as (metadata, _):
            yield PeerCall(
                metadata.get(OWNER, ""), valid_tenant(metadata.get(TENANT_ID, ""), ""), metadata.get(WHOLE) == "true"
            )

    @contextmanager
    def _measured(self, method: str, context: _Context) -> Iterator[tuple[dict[str, str], str]]:
        """Yields a call's metadata and the trace context of its span.

        It may be closed from another task, as a stream's is when its client disconnects.
        """
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        received = metadata.get(TRACEPARENT, "")
        about = {"rpc.system": "grpc", "rpc.method": method}
        span = self._tracing.start(f"ryzanstein.v1.{method}", received, about, kind=SpanKind.SERVER)
        code, began_s = "OK", time.monotonic()
        try:
            yield metadata, traceparent(span, received)
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
            self._telemetry.request_ended("grpc", method, code, time.monotonic() - began_s)
            span.set_attribute("rpc.grpc.status", code)
            span.end()
