"""How clients reach the services of a cluster: a router with a key and with TLS, the others as a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.rpc.client import client_options

ANY_NODE, ORCHESTRATOR = Peer(PeerRole.NODE), Peer(PeerRole.ORCHESTRATOR)


@dataclass(frozen=True, slots=True)
class RouterTrust:
    """CAs in PEM form. `name` is what the router's certificate is for, where that is not its address."""

    roots: bytes = field(repr=False)
    name: str = ""

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """The options of a channel, besides the usual ones."""
        return (("grpc.ssl_target_name_override", self.name),) if self.name else ()

    def open(self, address: str, interceptors: list[grpc.aio.ClientInterceptor] | None) -> grpc.aio.Channel:
        """Returns a channel, which the caller closes."""
        options = (*client_options(), *self.options)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.roots), options, interceptors=interceptors)


@dataclass(frozen=True, slots=True)
class KeyedRouter:
    """A router at host:port, and the key for it; empty: none. `trust` None: it is reached without TLS."""

    address: str
    key: str = field(default="", repr=False)
    trust: RouterTrust | None = None

    def open(self) -> grpc.aio.Channel:
        """Returns a channel, which the caller closes. All its calls carry the key."""
        interceptors = [_UnaryKey(self.key), _StreamKey(self.key)] if self.key else None
        if self.trust is not None:
            return self.trust.open(self.address, interceptors)
        return grpc.aio.insecure_channel(self.address, options=client_options(), interceptors=interceptors)


def _with_key(key: str, details: Any) -> Any:
    return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {key}")))


class _UnaryKey(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_key(self._key, details), request)


class _StreamKey(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_key(self._key, details), request)
