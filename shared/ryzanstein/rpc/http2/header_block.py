"""A header block, which may come in several frames: HEADERS and what continues it (RFC 9113, section 6.10)."""

from __future__ import annotations

from ryzanstein.rpc.http2.frames import ErrorCode, Flag, FrameType, Http2Error

MAX_FRAMES = 32


class HeaderBlock:
    """Puts the blocks of one connection together, of at most `max_bytes` each."""

    __slots__ = ("_fragments", "_max_bytes", "_num_frames", "flags", "stream_id")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._fragments: bytearray | None = None
        self._num_frames = 0
        self.stream_id = self.flags = 0
        """Those of the HEADERS with which the last block began."""

    def check(self, kind: int, stream_id: int) -> None:
        """Raises Http2Error for a frame that comes between the parts of a block."""
        if self._fragments is not None and (kind != FrameType.CONTINUATION or stream_id != self.stream_id):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "headers were not continued")

    def begun(self, flags: int, stream_id: int, fragment: bytes) -> bytes | None:
        """Takes what HEADERS have, without padding. Returns the block if it is whole. Raises Http2Error if it is too long."""
        self.stream_id, self.flags, self._num_frames = stream_id, flags, 0
        self._fragments = bytearray()
        return self.continued(flags, fragment)

    def continued(self, flags: int, fragment: bytes) -> bytes | None:
        """Takes what a CONTINUATION has; see `begun`."""
        block = self._fragments
        if block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a continuation of no headers")
        block += fragment
        self._num_frames += 1
        if len(block) > self._max_bytes or self._num_frames > MAX_FRAMES:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {self._max_bytes} bytes")
        if not flags & Flag.END_HEADERS:
            return None
        self._fragments = None
        return bytes(block)
