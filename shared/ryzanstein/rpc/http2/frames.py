"""Frames of HTTP/2 (RFC 9113, sections 4 and 6): reading them from bytes, and the bytes of those that are sent."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
MAX_FRAME_BYTES = 16_384
"""The largest frame that every peer may send. These ends announce no other."""
DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1


class FrameType(IntEnum):
    """RFC 9113, section 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag:
    """The flags of the frame types that have them. Plain numbers: on an enumeration's members they cost ten times more."""

    NONE = 0x0
    END_STREAM = 0x1
    ACK = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    """RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12


class Http2Error(Exception):
    """The peer does not keep to HTTP/2: the connection ends with this code. The message says why, for people."""

    def __init__(self, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.code = code


TakeFrame = Callable[[int, int, int, bytes], None]
_HEADER = struct.Struct(">IBI")
_UINT32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")


class FrameReader:
    """Cuts what a connection received into frames, and passes each to `take(kind, flags, stream_id, payload)`."""

    def __init__(self, take: TakeFrame) -> None:
        self._take = take
        self._unread = b""

    def feed(self, data: bytes) -> None:
        """Passes on all frames that are complete. Raises Http2Error for one that is too large, and whatever `take` raises."""
        unread = self._unread + data if self._unread else data
        at, size, take = 0, len(unread), self._take
        while size - at >= HEADER_BYTES:
            length_and_kind, flags, stream_id = _HEADER.unpack_from(unread, at)
            length = length_and_kind >> 8
            if length > MAX_FRAME_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes, more than {MAX_FRAME_BYTES}")
            end = at + HEADER_BYTES + length
            if end > size:
                break
            take(length_and_kind & 0xFF, flags, stream_id & MAX_WINDOW, unread[at + HEADER_BYTES : end])
            at = end
        self._unread = unread[at:] if at else unread


def frame_header(kind: FrameType, flags: int, stream_id: int, length: int) -> bytes:
    """Returns the 9 bytes before a payload."""
    return _HEADER.pack(length << 8 | kind, flags, stream_id)


def frame(kind: FrameType, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Returns a whole frame."""
    return _HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """Returns the frame that announces these settings."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings.items()))


def window_update(stream_id: int, num_bytes: int) -> bytes:
    """Returns the frame that lets the peer send so many bytes more."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _UINT32.pack(num_bytes))


def reset(stream_id: int, code: ErrorCode) -> bytes:
    """Returns the frame that ends a stream."""
    return frame(FrameType.RST_STREAM, 0, stream_id, _UINT32.pack(code))


def goaway(code: ErrorCode, why: str = "") -> bytes:
    """Returns the frame that ends a connection. `why` is for people."""
    return frame(FrameType.GOAWAY, 0, 0, _UINT32.pack(0) + _UINT32.pack(code) + why.encode()[:256])


def read_uint32(payload: bytes, what: str) -> int:
    """Returns the number that a frame consists of. Raises Http2Error."""
    if len(payload) != 4:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes")
    return int.from_bytes(payload)


def read_increment(payload: bytes) -> int:
    """Returns by how much a WINDOW_UPDATE extends a window. Raises Http2Error."""
    increment = read_uint32(payload, "WINDOW_UPDATE") & MAX_WINDOW
    if not increment:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
    return increment


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Returns identifiers and values in their order. Raises Http2Error."""
    if len(payload) % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    return list(_SETTING.iter_unpack(payload))


def without_padding(flags: int, payload: bytes) -> bytes:
    """Returns what a frame of DATA or HEADERS carries. Raises Http2Error for more padding than payload."""
    if not flags & (Flag.PADDED | Flag.PRIORITY):
        return payload
    begin = int(bool(flags & Flag.PADDED))
    end = len(payload) - (payload[0] if begin and payload else 0)
    begin += 5 if flags & Flag.PRIORITY else 0
    if end < begin or not payload:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[begin:end]
