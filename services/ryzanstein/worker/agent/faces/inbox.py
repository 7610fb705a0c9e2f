"""Frames that a router has sent and the node has not handled yet, in order.

Reading goes on while a long prompt is tokenized. So the node sees beats and the end of a stream at
once, however much work the frames before them cause.
"""

from __future__ import annotations

import asyncio

from ryzanstein.v1 import worker_pb2 as pb

# More than a node can tokenize before its routers try another node.
MAX_BYTES = 32 * 2**20
_FRAME_BYTES = 256  # approximate overhead of a frame


class ReadAhead:
    """A queue bounded in bytes: when it is full, `put` waits. A single frame always fits."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._frames: asyncio.Queue[tuple[pb.ConnectRequest, int]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, frame: pb.ConnectRequest) -> None:
        await self._room.wait()
        size = frame.ByteSize() + _FRAME_BYTES
        self._count(size)
        self._frames.put_nowait((frame, size))

    async def get(self) -> pb.ConnectRequest:
        frame, size = await self._frames.get()
        self._count(-size)
        return frame

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes < self._max_bytes:
            self._room.set()
        else:
            self._room.clear()
