"""Channels to routers: TLS, the key, and what the connection does by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from ryzanstein.addresses import host_of, is_loopback

Metadata = tuple[tuple[str, str], ...]
Option = tuple[str, str | int]

# A begin must not be repeated behind the back of the client, which knows what it has begun. Routers allow a ping in 5 s.
OPTIONS: tuple[Option, ...] = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # gRPC's name for how long a connection may take to open; its default is 20 s.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom the client trusts, in PEM form; `ca` None: whom gRPC does. `name`: what the certificate is for, where that is not
    the address. `chain` and `key`: the client's own certificate."""

    ca: bytes | None = field(default=None, repr=False)
    name: str = ""
    chain: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.chain)

    @property
    def options(self) -> tuple[Option, ...]:
        return (*OPTIONS, ("grpc.ssl_target_name_override", self.name)) if self.name else OPTIONS


def open_channel(maker: Any, router: str, tls: Tls | None) -> Any:
    """Returns a channel, which connects at its first call. `maker`: `grpc` or `grpc.aio`."""
    if tls is None:
        return maker.insecure_channel(router, options=OPTIONS)
    return maker.secure_channel(router, tls.credentials, options=tls.options)


def metadata_of(key: str | None, routers: Sequence[str], tls: Tls | None, *, insecure: bool) -> Metadata:
    """Returns what each call carries. Raises ValueError if a key would cross a network that others can read."""
    if not key:
        return ()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("key: must be printable ASCII without spaces")
    open_ones = [address for address in routers if not is_local(address)]
    if tls is None and open_ones and not insecure:
        raise ValueError(f"key: is not sent to {open_ones[0]} without TLS; give `tls`, or `insecure=True`")
    return (("authorization", f"Bearer {key}"),)


def is_local(address: str) -> bool:
    """Whether what is sent to an address stays on this machine."""
    return address.startswith("unix:") or is_loopback(host_of(address))
