"""Opens the connection of one call."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ryzanstein.addresses import split_address
from ryzanstein.rpc.http2.call_end import CallFailedError, no_server
from ryzanstein.rpc.http2.client_stream import ClientStream, MessageReceiver

_CLOSING_S = 1.0
_NEXT_ADDRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamTls:
    """TLS of a connection: what its handshake uses, and the name that the server's certificate must have."""

    context: ssl.SSLContext
    server_name: str


async def open_stream(
    address: str, method: str, receiver: MessageReceiver, max_message_bytes: int, tls: StreamTls | None = None
) -> ClientStream:
    """Begins a call of `/package.Service/Method` at host:port. It asks no proxy.

    Raises CallFailedError if there is no connection.
    """
    target = _target(address)
    headers = _headers(method, tls.server_name if tls else target.authority, "https" if tls else "http")
    made = partial(ClientStream, headers, receiver, max_message_bytes)
    secure = {} if tls is None else {"ssl": tls.context, "server_hostname": tls.server_name, "ssl_shutdown_timeout": _CLOSING_S}
    try:
        return await target.connect(made, secure)
    except ssl.SSLCertVerificationError as error:
        raise CallFailedError(no_server(f"{address} is not trusted: {error.verify_message}")) from None
    except OSError as error:  # also what OpenSSL says
        why = getattr(error, "reason", None) or error.strerror or str(error) or type(error).__name__
        raise CallFailedError(no_server(f"no connection to {address}: {why}")) from None


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a server is: a path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0
    authority: str = "localhost"

    async def connect(self, made: Callable[[], ClientStream], secure: dict[str, Any]) -> ClientStream:
        """Tries the addresses of a host in turn: one that nobody answers at must not hide the others. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self.path:
            return (await loop.create_unix_connection(made, self.path, **secure))[1]
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        failure = OSError(f"{self.host} has no address")
        for number, (*_, where) in enumerate(found, 1):
            try:
                async with asyncio.timeout(None if number == len(found) else _NEXT_ADDRESS_S):
                    return (await loop.create_connection(made, str(where[0]), self.port, **secure))[1]
            except TimeoutError:
                failure = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
        raise failure


def _target(address: str) -> _Target:
    """Returns where an address of gRPC leads (gRPC's naming: `host:port`, `dns:`, `ipv4:`, `ipv6:`, `unix:`)."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme == "unix":
        return _Target(path=rest.removeprefix("//"))
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        address = rest.rpartition("/")[2]
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise CallFailedError(no_server(f"the address {error}")) from None
    return _Target(host=host, port=port, authority=address)


def _headers(method: str, authority: str, scheme: str) -> Mapping[str, str]:
    return {
        ":method": "POST",
        ":scheme": scheme,
        ":path": method,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "ryzanstein",
    }
