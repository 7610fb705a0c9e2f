"""Bytes for a TCP port that are not what listens there expects, and how they are sent."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(32) + b"\x00\x00\x02\x13\x01\x01\x00\x00\x99"
_WAIT_S = 0.2
_READ_BYTES = 2**16


def garbage(random: Random) -> bytes:
    """Noise, another protocol, the beginning of a conversation, or frames that contradict HTTP/2 (RFC 9113)."""
    noise = random.randbytes(random.randrange(1, 300))
    return random.choice(
        (
            noise,
            _TLS_HELLO,
            b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{" + noise,
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + noise,
            b"GET /metrics?name[]=" + noise.hex().encode() + b" HTTP/1.1\r\nAccept: " + noise[:40].hex().encode() + b"\r\n\r\n",
            b"GET " + noise + b" HTTP/1.1\r\n\r\n",
            b"G" * random.randrange(1, 70_000),
            b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(random.randrange(200))) + b"\r\n",
            _PREFACE[: random.randrange(1, len(_PREFACE))],
            _PREFACE + noise,
            _PREFACE + _SETTINGS + _call(random, noise),
            _PREFACE + _SETTINGS + noise,
            _PREFACE + _SETTINGS + _frame(random, noise),
            _PREFACE + _SETTINGS + b"".join(_frame(random, noise[:20]) for _ in range(20)),
        )
    )


_HEADERS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"x"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
_PATHS = (
    b"/ryzanstein.v1.InferenceService/ListModels",
    b"/ryzanstein.v1.OrchestratorService/ListNodes",
    b"/ryzanstein.v1.WorkerService/GetStatus",
)
_ATTACKED = (b"x-request-id", b"x-tenant-id", b"traceparent", b"x-bin", b"grpc-timeout", b"grpc-encoding", b"user-agent")


def _call(random: Random, noise: bytes) -> bytes:
    """A call that is well but for one header."""
    headers = (*_HEADERS, (b":path", random.choice(_PATHS)), (random.choice(_ATTACKED), noise[:100]))
    block = b"".join(bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in headers)
    begun = len(block).to_bytes(3) + b"\x01\x04" + (1).to_bytes(4) + block
    return begun + (5).to_bytes(3) + b"\x00\x01" + (1).to_bytes(4) + bytes(5)


def _frame(random: Random, payload: bytes) -> bytes:
    """Of any type, for any stream, its length mostly true."""
    length = len(payload) if random.random() < 0.8 else random.randrange(2**24)
    return length.to_bytes(3) + random.randbytes(2) + random.randrange(8).to_bytes(4) + payload


async def send(host: str, port: int, data: bytes) -> bytes:
    """What came back within a moment; then the connection is closed, perhaps in the middle. OSError: nothing listens."""
    reader, writer = await asyncio.open_connection(host, port)
    received = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        await asyncio.wait_for(writer.drain(), _WAIT_S)
        received = await asyncio.wait_for(reader.read(_READ_BYTES), _WAIT_S)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return received
