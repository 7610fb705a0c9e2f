"""Counts what a process sends and receives in messages of gRPC, where they are serialized anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import grpc

from ryzanstein.auth.peers.peer import Expect
from ryzanstein.rpc.client import Dialer

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """Messages and their bytes, without what HTTP/2 and TCP add."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0

    def sending(self, serialize: Callable[[T], bytes]) -> Callable[[T], bytes]:
        """Returns a serializer that counts."""

        def counted(message: T) -> bytes:
            data = serialize(message)
            self.sent_messages += 1
            self.sent_bytes += len(data)
            return data

        return counted

    def receiving(self, parse: Callable[[bytes], T]) -> Callable[[bytes], T]:
        """Returns a parser that counts."""

        def counted(data: bytes) -> T:
            self.received_messages += 1
            self.received_bytes += len(data)
            return parse(data)

        return counted

    def document(self) -> dict[str, int]:
        return asdict(self)


class CountingDialer(Dialer):
    """Dials without TLS, and counts what its channels carry."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def open(self, address: str, expect: Expect, *, retries: bool = True) -> grpc.aio.Channel:
        channel: Any = super().open(address, expect, retries=retries)
        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            setattr(channel, kind, _counting(getattr(channel, kind), self._traffic))
        opened: grpc.aio.Channel = channel
        return opened


def _counting(make: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    def made(method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        return make(method, traffic.sending(request_serializer), traffic.receiving(response_deserializer), **options)

    return made
