"""Channels, created in the same way by all our clients.

They never use a proxy, whatever the environment names: gRPC would ask it even for 127.0.0.1, and
reads `no_proxy` in lower case alone.
"""

from __future__ import annotations

import json

import grpc

from ryzanstein.rpc.server import MAX_MESSAGE_BYTES

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


def open_channel(address: str, *, retries: bool = True) -> grpc.aio.Channel:
    """Returns a channel to host:port, which the caller closes.

    Without `retries` a failed connect is reported at once (for node links).
    """
    return grpc.aio.insecure_channel(address, options=client_options(retries=retries))


def client_options(*, retries: bool = True) -> tuple[tuple[str, str | int], ...]:
    """Returns the options of a channel, for callers that open it themselves."""
    retry: tuple[tuple[str, str | int], ...] = (
        (("grpc.service_config", _SERVICE_CONFIG),) if retries else (("grpc.enable_retries", 0),)
    )
    return (*CLIENT_OPTIONS, *retry)


def open_blocking_channel(address: str) -> grpc.Channel:
    """Returns a channel for callers without an event loop, which they close."""
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
