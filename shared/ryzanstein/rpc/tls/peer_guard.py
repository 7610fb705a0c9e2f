"""Whom a service admits, by the certificate of the connection: roles, and certificates that were denied.

gRPC tells a server who calls only when the handler runs, so this stands around every handler. The
handshake has verified the certificate by then.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from ryzanstein.auth import refusals
from ryzanstein.auth.peers.material import Denied, LiveMaterial, Material
from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import PEER, Peer, peer_in
from ryzanstein.auth.peers.rules import OPEN, PEER_RULES
from ryzanstein.errors import RyzansteinError

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    peer: Peer
    certificate: bytes
    task: asyncio.Task[Any] | None
    denied: bool = False

    def deny(self) -> None:
        self.denied = True
        if self.task is not None:
            self.task.cancel()


class PeerGuard:
    """Admits calls, and ends those of a peer that is denied meanwhile."""

    def __init__(self, material: LiveMaterial, metrics: TlsMetrics) -> None:
        self._server, self._trust, self._metrics = material.current.peer, material.trust, metrics
        self._denied: Denied = material.current.denied
        self._calls: set[_Call] = set()
        material.observe(self._changed)

    @contextmanager
    def admitted(self, method: str, context: Any) -> Iterator[None]:
        """Runs a call. Raises PERMISSION_DENIED if its peer may not make it, or is denied while it runs."""
        auth = context.auth_context()
        if b"ssl" not in auth.get("transport_security_type", ()):
            self._metrics.plaintext_calls.inc()
            yield  # a port without TLS is open only while TLS is not required
            return
        certificate = next(iter(auth.get("x509_pem_cert", ())), b"")
        peer = self._checked(method, peer_in(auth, self._trust), certificate, context.peer())
        call = _Call(peer, certificate, asyncio.current_task())
        self._calls.add(call)
        PEER.set(peer)
        try:
            yield
        except asyncio.CancelledError:
            if not call.denied:
                raise
            if call.task is not None:
                call.task.uncancel()
            raise refusals.peer_denied(str(peer)) from None
        except RyzansteinError as error:
            if error.reason == refusals.NOT_YOUR_NAME:
                self._count(method, peer, context.peer())
            raise
        finally:
            self._calls.discard(call)

    def _checked(self, method: str, peer: Peer | None, certificate: bytes, via: str) -> Peer:
        need = PEER_RULES.get(method)
        if peer is None or need is None or not need.admits(peer, self._server):
            self._count(method, peer, via)
            raise refusals.role_not_allowed("" if peer is None else str(peer), method)
        if self._denied.denies(peer, certificate):
            self._count(method, peer, via)
            raise refusals.peer_denied(str(peer))
        return peer

    def _count(self, method: str, peer: Peer | None, via: str) -> None:
        """Counts a refusal. Methods of no table are one, so that the label has few values. `via` is the peer's address."""
        role, known = "" if peer is None else peer.role.value, method if method in PEER_RULES else "other"
        self._metrics.peer_refused.labels(role, known).inc()
        log.warning("peer refused", audit=True, method=method, peer=str(peer or ""), via=via)

    def _changed(self, material: Material) -> None:
        self._denied = material.denied
        for call in [each for each in self._calls if self._denied.denies(each.peer, each.certificate)]:
            log.warning("peer denied, its call ends", peer=str(call.peer))
            call.deny()


class PeerInterceptor(grpc.aio.ServerInterceptor):
    """Puts a guard around every handler but those of the health service."""

    def __init__(self, guard: PeerGuard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = await continuation(handler_call_details)
        method = handler_call_details.method
        if found is None or method.startswith(OPEN):
            return found
        handler: Any = found
        if handler.response_streaming:
            wrap = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            behavior: Any = handler.stream_stream or handler.unary_stream
        else:
            wrap = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
            behavior = handler.stream_unary or handler.unary_unary
        guarded = _frames if inspect.isasyncgenfunction(behavior) else _answer
        return wrap(guarded(self._guard, behavior, method), handler.request_deserializer, handler.response_serializer)


def _answer(guard: PeerGuard, behavior: Any, method: str) -> Any:
    async def call(request: Any, context: Any) -> Any:
        with guard.admitted(method, context):
            return await behavior(request, context)

    return call


def _frames(guard: PeerGuard, behavior: Any, method: str) -> Any:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        with guard.admitted(method, context):
            async for response in behavior(request, context):
                yield response

    return call
