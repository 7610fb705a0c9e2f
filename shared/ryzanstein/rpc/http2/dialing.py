"""Opens the connection of one call."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from ryzanstein.addresses import split_address
from ryzanstein.rpc.http2.call_end import CallFailedError, no_server
from ryzanstein.rpc.http2.client_stream import ClientStream, MessageReceiver

_CLOSING_S = 1.0


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
    headers = _headers(method, tls.server_name if tls else address, "https" if tls else "http")
    try:
        host, port = split_address(address)
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: ClientStream(headers, receiver, max_message_bytes),
            host,
            port,
            ssl=tls.context if tls else None,
            server_hostname=tls.server_name if tls else None,
            ssl_shutdown_timeout=_CLOSING_S if tls else None,
        )
    except ssl.SSLCertVerificationError as error:
        raise CallFailedError(no_server(f"{address} is not trusted: {error.verify_message}")) from None
    except OSError as error:  # also what OpenSSL says
        why = getattr(error, "reason", None) or error.strerror or str(error) or type(error).__name__
        raise CallFailedError(no_server(f"no connection to {address}: {why}")) from None
    except ValueError as error:
        raise CallFailedError(no_server(f"the address {error}")) from None
    return stream


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
