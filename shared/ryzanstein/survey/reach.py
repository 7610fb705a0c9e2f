"""How clients reach the services of a cluster: a router with a key and with TLS, the others as a peer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.rpc.client import client_options

KEY_VARIABLE = "RYZANSTEIN_API_KEY"
_MAX_KEY_CHARS = 8192
_MAX_CA_BYTES = 2**22  # the CAs of a Linux distribution are 0.2 MB
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


def read_key(path: Path | None) -> str:
    """Returns the key of a file, or of the environment where there is none; empty: no key. Raises ValueError."""
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        text = path.read_text()[: _MAX_KEY_CHARS + 1].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not text or len(text) > _MAX_KEY_CHARS or not (text.isascii() and text.isprintable()):
        raise ValueError(f"{path} must have one key and nothing else")
    return text


def read_roots(path: Path) -> bytes:
    """Returns the certificates in a file. Raises ValueError if it has none."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CA_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_CA_BYTES or b"-----BEGIN CERTIFICATE-----" not in content:
        raise ValueError(f"{path} has no certificate in PEM form")
    return content


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
