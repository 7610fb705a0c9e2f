"""A chat whose connection to the router is cut in the middle of an answer, with a real router behind a TCP proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.client import AsyncClient
from ryzanstein.demo import MODEL_DIR

pytestmark = pytest.mark.cluster


class CuttingProxy:
    """Passes bytes on; `cut` resets every connection, and new ones are accepted again."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: list[asyncio.StreamWriter] = []
        self.num_connections = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, upstream_writer]
        await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def cutting_proxy(address: str) -> AsyncIterator[tuple[CuttingProxy, str]]:
    host, _, port = address.rpartition(":")
    proxy = CuttingProxy(host, int(port))
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    async with server:
        yield proxy, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        proxy.cut()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1)) as started:
        yield started


@pytest.mark.long
async def test_the_answer_goes_on_over_a_new_connection_without_a_gap(cluster: LocalCluster) -> None:
    async with cutting_proxy(cluster.router_address) as (proxy, address):
        cut = False
        async with (
            AsyncClient(address, timeout_s=30, learn_routers=False) as client,
            client.stream("Count from 1 to 80.", temperature=0.0) as stream,
        ):
            async for _ in stream:
                if len(stream.answer.token_ids) >= 10 and not cut:
                    cut = True
                    proxy.cut()
    answer = stream.answer
    assert answer.text == " ".join(map(str, range(1, 81)))
    assert answer.reattaches == 1
    assert proxy.num_connections == 2
