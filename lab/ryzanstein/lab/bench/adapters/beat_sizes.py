"""Reads what nodes send to routers, as one more router that never asks anything, and measures it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

_LISTENER = "beat-sizes"
_CHANGING: tuple[Literal["sequence", "step", "time", "load", "preparing"], ...]
_CHANGING = ("sequence", "step", "time", "load", "preparing")
"""Fields of a beat that are numbers of other sizes at other times."""


@dataclass(slots=True)
class FrameSizes:
    """Bytes. `beats` are the sizes of beats without what changes, `largest_beat` is whole; `adapters` is the sum of reports."""

    beats: set[int] = field(default_factory=set)
    largest_beat: int = 0
    num_beats: int = 0
    adapters: int = 0
    num_reports: int = 0

    def take(self, frame: worker.ConnectResponse) -> None:
        if frame.HasField("beat"):
            self.num_beats += 1
            self.largest_beat = max(self.largest_beat, frame.ByteSize())
            for name in _CHANGING:
                frame.beat.ClearField(name)
            self.beats.add(frame.ByteSize())
        elif frame.HasField("adapters"):
            self.num_reports += 1
            self.adapters += frame.ByteSize()

    def document(self) -> dict[str, object]:
        """Returns them for JSON."""
        return {
            "beat_bytes": sorted(self.beats),
            "largest_beat_bytes": self.largest_beat,
            "beats": self.num_beats,
            "report_bytes": self.adapters,
            "reports": self.num_reports,
        }


@asynccontextmanager
async def listening(nodes: Mapping[str, str]) -> AsyncIterator[FrameSizes]:
    """Yields the sizes of all frames of these nodes, host:port by id, while they come."""
    sizes = FrameSizes()
    tasks = [asyncio.create_task(_listen(address, sizes)) for address in nodes.values()]
    try:
        yield sizes
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(address: str, sizes: FrameSizes) -> None:
    async with open_channel(address) as channel:
        call = worker_grpc.WorkerServiceStub(channel).Connect()
        await call.write(worker.ConnectRequest(hello=worker.RouterHello(router_id=_LISTENER)))
        async for frame in call:
            sizes.take(frame)
