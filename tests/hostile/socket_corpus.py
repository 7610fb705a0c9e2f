"""WebSocket traffic that is meant to hold a router's event loop, fill its memory, or confuse its parser (RFC 6455)."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tests.hostile.corpus import BODIES
from tests.hostile.victim import Victim

TEXT, BINARY, CONTINUATION, CLOSE, PING = 1, 2, 0, 8, 9
HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: ryzanstein.v1\r\n\r\n"
)
_ENOUGH_S = 1.0  # for an attack whose socket stays open


def frame(opcode: int, data: bytes = b"", *, fin: bool = True, masked: bool = True, reserved: int = 0) -> bytes:
    """A frame with a mask of zeros, which costs the sender nothing."""
    size, mask = len(data), 0x80 if masked else 0
    if size < 126:
        length = bytes([mask | size])
    else:
        length = (
            bytes([mask | 126]) + struct.pack("!H", size) if size < 65536 else bytes([mask | 127]) + struct.pack("!Q", size)
        )
    return bytes([(0x80 if fin else 0) | reserved | opcode]) + length + (bytes(4) if masked else b"") + data


def message(**fields: Any) -> bytes:
    return frame(TEXT, json.dumps(fields).encode())


def many(number: int, **fields: Any) -> bytes:
    """Messages that differ only in their ids."""
    return b"".join(message(id=str(i), **fields) for i in range(number))


def submitted(body: bytes, url: str, **more: Any) -> bytes:
    """`body` need be no JSON."""
    rest = json.dumps({"type": "submit", "id": "a", "url": url, **more}).encode()
    return frame(TEXT, rest[:-1] + b',"body":%s}' % body)


def _wrapped(name: str) -> bytes:
    (body,) = (body for body in BODIES if body.name == name)
    return submitted(body.content[: 4 * 2**20 - 200], body.path)


class Outcome(NamedTuple):
    """`close_code` is 0 where the socket was still open, and 1006 where it broke."""

    close_code: int
    received: bytes


@dataclass(frozen=True)
class HostileSocket:
    """`close_code`: how the router must end it; 0 where it must go on."""

    name: str
    make: Callable[[], bytes]
    close_code: int = 0

    @cached_property
    def content(self) -> bytes:
        return self.make()


def attack(router: Victim, content: bytes) -> Outcome:
    """Opens a socket, sends, and reads until the router closes or nothing comes any more."""
    with socket.create_connection(("127.0.0.1", router.ports["http_port"]), timeout=60) as one:
        one.sendall(HANDSHAKE)
        assert b" 101 " in one.recv(4096)
        one.setblocking(False)
        received, rest, end = b"", memoryview(content), time.monotonic() + _ENOUGH_S
        while time.monotonic() < end:
            readable, writable, _ = select.select([one], [one] if rest else [], [], 0.3)
            try:
                if readable:
                    if not (part := one.recv(262_144)):
                        return Outcome(_code(received), received)
                    received += part
                if not readable and not rest:
                    break
                if writable:
                    rest = rest[one.send(rest[:262_144]) :]
            except OSError:
                return Outcome(_code(received) or 1006, received)
    return Outcome(_code(received), received)


def _code(received: bytes) -> int:
    """The code of the last frame, if that is one that closes."""
    at = received.rfind(b"\x88")
    if at < 0 or at + 2 + received[at + 1] != len(received):
        return 0
    return int.from_bytes(received[at + 2 : at + 4], "big")


_HEAVY = ("4 MB of quotation marks", "a million empty messages", "2 million token ids", "2 million open brackets")
SOCKETS = (
    HostileSocket("4 MB of pings", lambda: frame(PING) * 700_000),
    HostileSocket("4 MB of pongs", lambda: frame(10) * 700_000),
    HostileSocket("pings of 125 bytes", lambda: frame(PING, b"x" * 125) * 30_000),
    HostileSocket(
        "4 MB in fragments of a byte",
        lambda: frame(TEXT, b"x", fin=False) + frame(CONTINUATION, b"x", fin=False) * 600_000,
        1008,
    ),
    HostileSocket("700,000 empty fragments", lambda: frame(TEXT, fin=False) + frame(CONTINUATION, fin=False) * 700_000, 1008),
    HostileSocket("700,000 empty messages", lambda: frame(TEXT) * 700_000, 1008),
    HostileSocket("4 MB that are no JSON", lambda: frame(TEXT, b"x" * 4_000_000)),
    HostileSocket("a byte too many", lambda: frame(TEXT, b"x" * (4 * 2**20 + 1)), 1009),
    HostileSocket("a frame of 2^62 bytes", lambda: b"\x81\xff" + struct.pack("!Q", 2**62) + bytes(4) + b"x" * 1000, 1009),
    HostileSocket(
        "fragments beyond the bound",
        lambda: frame(TEXT, b"x" * 2**21, fin=False) + frame(CONTINUATION, b"x" * (2**21 + 1)),
        1009,
    ),
    HostileSocket("a binary message", lambda: frame(BINARY, b"{}"), 1003),
    HostileSocket("no UTF-8 behind 4 MB", lambda: frame(TEXT, b"x" * 4_000_000 + b"\xff"), 1007),
    HostileSocket("frames without a mask", lambda: frame(TEXT, b"{}", masked=False) * 1000, 1002),
    HostileSocket("reserved bits, as of compression", lambda: frame(TEXT, b"{}", reserved=0x40), 1002),
    HostileSocket("an unknown opcode", lambda: frame(3, b"{}"), 1002),
    HostileSocket("a continuation of nothing", lambda: frame(CONTINUATION, b"{}"), 1002),
    HostileSocket("a ping of 126 bytes", lambda: frame(PING, b"x" * 126), 1002),
    HostileSocket("a ping in fragments", lambda: frame(PING, fin=False), 1002),
    HostileSocket("two messages in each other", lambda: frame(TEXT, b"{", fin=False) * 2, 1002),
    HostileSocket("a close code that is none", lambda: frame(CLOSE, struct.pack("!H", 5)), 1002),
    HostileSocket("a megabyte of zeros", lambda: bytes(2**20), 1002),
    HostileSocket("HTTP", lambda: HANDSHAKE * 5000, 1002),
    HostileSocket("10,000 submits", lambda: many(10_000, type="submit", url="/v1/completions", body={"prompt": "x"})),
    HostileSocket("10,000 attaches", lambda: many(10_000, type="attach", generation="cmpl-x")),
    HostileSocket("10,000 cancels", lambda: message(type="cancel", generation="cmpl-x") * 10_000),
    HostileSocket("20,000 credits", lambda: many(20_000, type="credit", chunks=1)),
    HostileSocket("10,000 messages of no kind", lambda: message(type="dance") * 10_000, 1008),
    HostileSocket("60,000 brackets in a body", lambda: submitted(b"[" * 60_000, "/v1/completions")),
    HostileSocket("60,000 headers", lambda: submitted(b"{}", "x", headers={str(i): "" for i in range(60_000)})),
    HostileSocket(
        "200,000 indices", lambda: message(type="attach", id="a", generation="g", from_index=dict.fromkeys(range(200_000), 1))
    ),
    *(HostileSocket(f"{name}, submitted", lambda name=name: _wrapped(name)) for name in _HEAVY),
)
