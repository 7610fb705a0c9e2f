"""The headers of calls: what a request's say (gRPC over HTTP2), and the bytes of a response's.

Header blocks of responses have literals alone (RFC 7541, section 6.2.2), so that this end keeps no table for them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import grpc
from hpack import Decoder

from ryzanstein.rpc.http2.frames import MAX_FRAME_BYTES, Flag, FrameType, frame
from ryzanstein.rpc.http2.messages import ENCODINGS, IDENTITY

Metadata = tuple[tuple[str, str | bytes], ...]
MAX_METADATA_BYTES = 16 * 1024
"""As counted by HTTP/2: 32 bytes for each field, and its name and value."""
MAX_BLOCK_BYTES = 4 * MAX_METADATA_BYTES
_MAX_KNOWN, _MAX_KNOWN_BLOCK, _MAX_KNOWN_SIZE = 16, 1024, 4096
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_OWN = frozenset(("te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding", "grpc-message-type"))
_BINARY = "-bin"
_STATUS_200 = b"\x88"  # the entry 8 of the static table
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a request's headers say. `problem`: the call ends with it at once; `http`: it is no call of gRPC."""

    method: str = ""
    invocation_metadata: Metadata = ()
    timeout_s: float | None = None
    encoding: str = IDENTITY
    problem: tuple[grpc.StatusCode, str] | None = None
    http: int = 200
    size: int = 0


class RequestHeads:
    """Reads the header blocks of one connection, in order.

    Equal blocks mean the same while the table that they refer to stays as it is. Most calls of a client have equal ones.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._known: dict[bytes, RequestHead] = {}

    def read(self, block: bytes) -> RequestHead:
        """Returns what the headers say. Raises HPACKError."""
        if (known := self._known.get(block)) is not None:
            return known
        table = self._decoder.header_table
        before, first = (table.maxsize, len(table.dynamic_entries)), _first(table.dynamic_entries)
        head = _head([(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)])
        if (table.maxsize, len(table.dynamic_entries)) != before or _first(table.dynamic_entries) is not first:
            self._known.clear()
        elif len(self._known) < _MAX_KNOWN and len(block) <= _MAX_KNOWN_BLOCK and head.size <= _MAX_KNOWN_SIZE:
            self._known[block] = head
        return head


def _first(entries: Sequence[object]) -> object:
    """Returns the newest entry of a table: another one after any that was added."""
    return entries[0] if entries else None


def _head(fields: list[tuple[bytes, bytes]]) -> RequestHead:
    pseudo: dict[str, str] = {}
    own: dict[str, str] = {}
    metadata: list[tuple[str, str | bytes]] = []
    size = 0
    for raw_name, raw_value in fields:
        size += 32 + len(raw_name) + len(raw_value)
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name.startswith(":"):
            pseudo[name] = value
        elif name in _OWN:
            own[name] = value
        elif name.endswith(_BINARY):
            own[_BINARY] = name if (values := _from_base64(raw_value)) is None else own.get(_BINARY, "")
            metadata.extend((name, each) for each in values or ())
        else:
            metadata.append((name, value))
    if pseudo.get(":method") != "POST":
        return RequestHead(http=405)
    if not own.get("content-type", "").startswith("application/grpc"):
        return RequestHead(http=415)
    problem = _problem(own, size)
    if problem is not None:
        return RequestHead(pseudo.get(":path", ""), problem=problem, size=size)
    timeout_s = _seconds(own["grpc-timeout"]) if "grpc-timeout" in own else None
    encoding = own.get("grpc-encoding", IDENTITY)
    return RequestHead(pseudo.get(":path", ""), tuple(metadata), timeout_s, encoding, size=size)


def _problem(own: Mapping[str, str], size: int) -> tuple[grpc.StatusCode, str] | None:
    """Returns the status of a call whose headers of `size` bytes cannot be taken."""
    encoding, timeout = own.get("grpc-encoding", IDENTITY), own.get("grpc-timeout", "1S")
    if size > MAX_METADATA_BYTES:
        return grpc.StatusCode.RESOURCE_EXHAUSTED, f"metadata of {size} bytes, at most {MAX_METADATA_BYTES} are read"
    if encoding not in ENCODINGS.split(","):
        return grpc.StatusCode.UNIMPLEMENTED, f"the encoding {encoding[:32]!r} is not known; known are {ENCODINGS}"
    if name := own.get(_BINARY):
        return grpc.StatusCode.INTERNAL, f"the value of {name[:32]!r} is not base64"
    if not _TIMEOUT.fullmatch(timeout):
        return grpc.StatusCode.INTERNAL, f"grpc-timeout {timeout[:32]!r} is not a duration"
    return None


def _seconds(timeout: str) -> float:
    return int(timeout[:-1]) * _UNIT_S[timeout[-1]]


def _from_base64(value: bytes) -> list[bytes] | None:
    """Returns the values of a binary field, with commas between; None if one is not base64. Padding may be missing."""
    try:
        return [base64.b64decode(each + b"=" * (-len(each) % 4), validate=True) for each in value.split(b",")]
    except binascii.Error:
        return None


def response_head(metadata: Metadata = ()) -> bytes:
    """Returns the header block that begins a response."""
    return _BEGIN + b"".join(_field(name, value) for name, value in metadata)


def trailers(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> bytes:
    """Returns the header block that ends a response."""
    if code is grpc.StatusCode.OK and not details and not metadata:
        return _OK
    fields: list[tuple[str, str | bytes]] = [("grpc-status", str(code.value[0]))]
    if details:
        fields.append(("grpc-message", quote(details, safe=_PRINTABLE)))
    return b"".join(_field(name, value) for name, value in (*fields, *metadata))


def whole_response(http: int) -> bytes:
    """Returns the header block of a response without a body, to a request that is no call."""
    return _field(":status", str(http))


def header_frames(stream_id: int, block: bytes, *, last: bool) -> bytes:
    """Returns a header block in as many frames as it needs. `last`: nothing follows on the stream."""
    flags = Flag.END_STREAM if last else Flag.NONE
    if len(block) <= MAX_FRAME_BYTES:
        return frame(FrameType.HEADERS, flags | Flag.END_HEADERS, stream_id, block)
    parts = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    frames = [frame(FrameType.HEADERS, flags, stream_id, parts[0])]
    frames += [frame(FrameType.CONTINUATION, 0, stream_id, part) for part in parts[1:-1]]
    return b"".join(frames) + frame(FrameType.CONTINUATION, Flag.END_HEADERS, stream_id, parts[-1])


def _field(name: str, value: Any) -> bytes:
    if name.endswith(_BINARY):
        value = base64.b64encode(value).rstrip(b"=")
    elif isinstance(value, str):
        value = value.encode("utf-8")
    lowered = name.lower().encode("ascii")
    return b"\x00" + _length(len(lowered)) + lowered + _length(len(value)) + bytes(value)


def _length(number: int) -> bytes:
    """Returns an integer with a prefix of 7 bits (RFC 7541, section 5.1)."""
    if number < 127:
        return bytes((number,))
    encoded, number = bytearray((127,)), number - 127
    while number >= 128:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_BEGIN = _STATUS_200 + _field("content-type", "application/grpc") + _field("grpc-accept-encoding", ENCODINGS)
_OK = _field("grpc-status", "0")
