"""Measures what a page costs the two agents between one node's slab and the other's, in processor time.

    .venv/bin/python lab/benchmarks/page_messages.py [--page-bytes 98304] [--pages 2000]

A sender and a receiver in one process, over a real socket, with pages of random bytes and without ranks: the pages are
offered, packed, checked and copied as agents do it. `pieces` is what an older node gets, one page a message; `whole` is several
in a message; with the suffix `, kept` the allocator keeps freed memory, as agents let it. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import pages_pb2 as pb
from ryzanstein.v1.pages_pb2_grpc import add_PageServiceServicer_to_server
from ryzanstein.worker.agent.faces.pages import PageServicer
from ryzanstein.worker.agent.pages.page import Page, PageSizes
from ryzanstein.worker.agent.pages.store import Scope
from ryzanstein.worker.agent.pages.tiers.node_store import NodeStore
from ryzanstein.worker.devices import keep_freed_memory
from ryzanstein.worker.page_metrics import PageMetrics

SLAB_BYTES = 32 * 2**20
BATCH = 10  # pages that a sender's ranks give at once
CASES = ("pieces", "pieces, kept", "whole", "whole, kept")


class Slab:
    """The part of a mover that copies pages; places are used again, from the first one on."""

    def __init__(self, page_bytes: int) -> None:
        self._slab, self._page_bytes = mmap.mmap(-1, SLAB_BYTES), page_bytes
        self._slab.write(os.urandom(SLAB_BYTES))

    def take(self, keys: Sequence[bytes]) -> list[Page]:
        size = self._page_bytes
        return [Page(key, self._slab[place * size : (place + 1) * size]) for place, key in enumerate(keys)]

    async def missing(self, keys: Sequence[bytes]) -> list[int]:
        return list(range(len(keys)))

    async def put(self, pages: Sequence[Page], parent: bytes) -> int:
        for place, page in enumerate(pages):
            start = place % (SLAB_BYTES // self._page_bytes) * self._page_bytes
            self._slab[start : start + len(page.content)] = page.content
        return len(pages)


class Older(PageServicer):
    """A node that takes pieces alone."""

    async def OfferPages(self, request: pb.OfferPagesRequest, context: Any) -> pb.OfferPagesResponse:
        return pb.OfferPagesResponse(missing=(await super().OfferPages(request, context)).missing)


async def measure(case: str, page_bytes: int, num_pages: int) -> float:
    """Returns microseconds of processor time for each page, of both sides."""
    scope = Scope("m", "", b"r" * 16, PageSizes(page_bytes))
    sender, receiver = Slab(page_bytes), Slab(page_bytes)

    async def checked(*_: object) -> tuple[Slab, Scope]:
        return receiver, scope

    pages = SimpleNamespace(metrics=PageMetrics(CollectorRegistry()), checked=checked)
    core = SimpleNamespace(version=SimpleNamespace(pages=pages), drains=set(), settings=SimpleNamespace(node_id="n"))
    models: Any = SimpleNamespace(of=lambda _: SimpleNamespace(node=core))
    server = RpcServer("127.0.0.1", 0, [])
    add_PageServiceServicer_to_server((Older if case.startswith("pieces") else PageServicer)(models), server.server)
    await server.start()
    store = NodeStore(f"127.0.0.1:{server.port}", lambda: None)

    async def send(num: int) -> None:
        keys = [number.to_bytes(17, "big") for number in range(num)]
        await store.missing(scope, keys[:512])

        async def batches() -> AsyncIterator[Sequence[Page]]:
            for start in range(0, num, BATCH):
                yield sender.take(keys[start : start + BATCH])

        assert await store.send(scope, b"", batches()) == num

    await send(num_pages // 4)
    began = time.process_time()
    await send(num_pages)
    took_s = time.process_time() - began
    await store.close()
    await server.stop(0)
    return 1e6 * took_s / num_pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-bytes", type=int, default=98_304)
    parser.add_argument("--pages", type=int, default=2000)
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        if given.case.endswith("kept"):
            keep_freed_memory()
        print(f"{given.case:>14}: {asyncio.run(measure(given.case, given.page_bytes, given.pages)):6.0f} us a page", flush=True)
        return
    flags = ["--page-bytes", str(given.page_bytes), "--pages", str(given.pages)]
    for case in CASES:
        subprocess.run([sys.executable, __file__, *flags, "--case", case], check=True)


if __name__ == "__main__":
    main()
