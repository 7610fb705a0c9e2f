"""Channels, created in the same way by all our clients.

They never use a proxy, whatever the environment names: gRPC would ask it even for 127.0.0.1, and
reads `no_proxy` in lower case alone.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, cast

import grpc

from ryzanstein.auth.peers.peer import Expect, Peer, PeerRole
from ryzanstein.leaders.channel import LeaderChannel
from ryzanstein.rpc.http2 import dialing
from ryzanstein.rpc.http2.call_end import CallFailedError, no_server
from ryzanstein.rpc.http2.client_stream import ClientStream, MessageReceiver
from ryzanstein.rpc.http2.dialing import StreamTls
from ryzanstein.rpc.server import MAX_MESSAGE_BYTES
from ryzanstein.rpc.tls.client_context import ClientCertificate, client_context

# Retries only UNAVAILABLE, and only before the first message; started streams are left to failover.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)

NO_PROXY = ("grpc.enable_http_proxy", 0)

CLIENT_OPTIONS = (
    NO_PROXY,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Reconnects to a peer within a second of its return, not after gRPC's default of two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each channel has its own connection: a failure of one never affects another.
    ("grpc.use_local_subchannel_pool", 1),
)


_Options = tuple[tuple[str, str | int], ...]


def open_channel(address: str, *, retries: bool = True) -> grpc.aio.Channel:
    """Returns a channel to host:port without TLS, which the caller closes.

    Without `retries` a failed connect is reported at once (for node links).
    """
    return grpc.aio.insecure_channel(address, options=client_options(retries=retries))


def client_options(*, retries: bool = True) -> tuple[tuple[str, str | int], ...]:
    """Returns the options of a channel, for callers that open it themselves."""
    retry: tuple[tuple[str, str | int], ...] = (
        (("grpc.service_config", _SERVICE_CONFIG),) if retries else (("grpc.enable_retries", 0),)
    )
    return (*CLIENT_OPTIONS, *retry)


class Certificates(ClientCertificate, Protocol):
    """A certificate, and which others are not trusted; see `auth.peers.material.Material`."""

    def denies(self, peer: Peer) -> bool:
        """Whether this peer is not trusted any more."""
        ...


class CertificateSource(Protocol):
    """The certificates as they are now, and how often they changed; see `auth.peers.material.LiveMaterial`."""

    trust: str
    version: int

    @property
    def current(self) -> Certificates: ...


class Dialer:
    """Opens channels to other services: with TLS if it has certificates, and then never without."""

    def __init__(self, certificates: CertificateSource | None = None) -> None:
        self._certificates = certificates
        self._context_of: Certificates | None = None
        self._context: Any = None  # of handshakes with these certificates

    @property
    def secure(self) -> bool:
        return self._certificates is not None

    @property
    def version(self) -> int:
        """Changes with the certificates. A channel that was opened before cannot connect again for long."""
        return 0 if self._certificates is None else self._certificates.version

    def trusts(self, peer: Peer) -> bool:
        """Whether a peer that the CAs vouch for is not denied by name."""
        return self._certificates is None or not self._certificates.current.denies(peer)

    def open(self, address: str, expect: Expect, *, retries: bool = True) -> grpc.aio.Channel:
        """Returns a channel to host:port, which the caller closes; see `open_channel`.

        With TLS it connects only to a server whose certificate is of the peer that is expected. With `retries`, calls of an
        orchestrator go to the one that leads; the address may then be several, with commas between them.
        """
        if retries and expect == Peer(PeerRole.ORCHESTRATOR):
            return cast(grpc.aio.Channel, LeaderChannel(address, lambda each: self._open(each, expect, retries=False)))
        return self._open(address, expect, retries)

    def _open(self, address: str, expect: Expect, retries: bool) -> grpc.aio.Channel:
        if self._certificates is None:
            return open_channel(address, retries=retries)
        options = (*client_options(retries=retries), *_name(expect, self._certificates))
        return grpc.aio.secure_channel(address, _credentials(self._certificates.current), options=options)

    async def open_stream(self, address: str, expect: Expect, method: str, receiver: MessageReceiver) -> ClientStream:
        """Begins a call of `/package.Service/Method` on a connection of its own, which the caller closes.

        For long streams of many messages. With TLS it connects as `open` does. Raises CallFailedError.
        """
        return await dialing.open_stream(address, method, receiver, MAX_MESSAGE_BYTES, self._stream_tls(expect))

    def _stream_tls(self, expect: Expect) -> StreamTls | None:
        if self._certificates is None:
            return None
        if (current := self._certificates.current) is not self._context_of:
            try:
                self._context_of, self._context = current, client_context(current)
            except (OSError, ValueError, TypeError) as error:  # what OpenSSL says, and Python of what is no PEM
                raise CallFailedError(no_server(f"the certificates cannot be used: {error}")) from None
        return StreamTls(self._context, expect.server_name(self._certificates.trust))

    def open_blocking(self, address: str, expect: Expect) -> grpc.Channel:
        """Returns a channel for callers without an event loop, which they close."""
        if self._certificates is None:
            return open_blocking_channel(address)
        options = (*CLIENT_OPTIONS, *_name(expect, self._certificates))
        return grpc.secure_channel(address, _credentials(self._certificates.current), options=options)


def _credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificates.roots, certificates.key, certificates.chain)


def _name(expect: Expect, certificates: CertificateSource) -> _Options:
    return (("grpc.ssl_target_name_override", expect.server_name(certificates.trust)),)


PLAIN = Dialer()
"""Dials without TLS."""


def open_blocking_channel(address: str) -> grpc.Channel:
    """Returns a channel for callers without an event loop, which they close."""
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
