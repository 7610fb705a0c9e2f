"""Measures what a request costs a router beside few and beside many nodes, as a ratio of one run.

    .venv/bin/python lab/benchmarks/many_nodes.py [--nodes 8 1000] [--streams 1 8] [--users 200] [--seconds 10] [--rounds 3]
        [--json FILE]

Two clusters of `ryzanstein bench control` run all the time, of few and of many nodes: each a real orchestrator and router, and
nodes without ranks that answer from a script, four tokens each. One is measured while the other rests, in turn, so that the
rest of the machine is as busy for both: a thousand idle nodes take cores and caches away from whatever is measured beside
them. Streams that share a node share writes: give both clusters at least as many nodes as streams.

Each request is of the next of `--users`, whose name is its key; 0: of one who never asked. `request`: the router's processor
time per request, in microseconds, less what it takes right after the load, while the nodes still beat as often as at work.
`with beats`: less only what it takes while all nodes are quiet, so the beats of all nodes that few requests woke are in it. The
median of the rounds counts. `suspected`: how often the router took a node for silent meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from ryzanstein.cli.status.scrape import page
from ryzanstein.lab.bench.control.cluster import ControlCluster, control_cluster
from ryzanstein.lab.bench.control.plan import ControlCell
from ryzanstein.lab.bench.descriptors import raise_descriptor_limit
from ryzanstein.lab.bench.router.load.connections import StreamLoad, connections, connections_for
from ryzanstein.lab.bench.router.load.http2 import Http2Connection
from ryzanstein.lab.bench.router.scripted.script import Script

SCRIPT = Script(tokens=4, model="model-0")
REST_S, WARM_S, AWAKE_S, SCRAPE_S, LIMIT_S = 14.0, 3.0, 7.0, 30.0, 60.0


@dataclass(frozen=True, slots=True)
class Window:
    """What a router did in some seconds."""

    seconds: float
    cpu_s: float
    requests: int = 0
    suspected: float = 0.0

    @property
    def cores(self) -> float:
        return self.cpu_s / self.seconds


@dataclass(frozen=True, slots=True)
class Round:
    """Windows without load, with it, and right after it."""

    quiet: Window
    loaded: Window
    awake: Window

    @property
    def request_us(self) -> float:
        return self._us(self.awake)

    @property
    def with_beats_us(self) -> float:
        return self._us(self.quiet)

    @property
    def requests_s(self) -> float:
        return self.loaded.requests / self.loaded.seconds

    def _us(self, less: Window) -> float:
        return 1e6 * (self.loaded.cores - less.cores) / max(1.0, self.requests_s)


Rounds = dict[int, list[Round]]


class UsersLoad(StreamLoad):
    """Keeps answers running, each of another user than the one before. `users` 0: of one who never asked."""

    def __init__(self, connections: list[Http2Connection], users: int, asked: Iterator[int]) -> None:
        super().__init__(connections, SCRIPT)
        self._users, self._asked = users, asked

    def _open(self, connection: Http2Connection) -> None:
        number, request = next(self._asked), SCRIPT.request()
        request.chat.user = f"user {number % self._users if self._users else number}"
        self._message = request.SerializeToString()
        super()._open(connection)


class MeasuredRouter:
    """The real router of a cluster."""

    def __init__(self, cluster: ControlCluster) -> None:
        (service,) = cluster.routers
        assert service.process is not None
        self._process = psutil.Process(service.process.pid)
        self._metrics, self.port = service.metrics_port, service.port

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def suspected(self) -> float:
        lines = page(f"http://127.0.0.1:{self._metrics}/metrics", SCRAPE_S).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("ryzanstein_router_suspicions_total"))

    async def window(self, seconds: float, load: StreamLoad | None = None) -> Window:
        """Measures what is going on for so long."""
        loop, suspected = asyncio.get_running_loop(), await asyncio.to_thread(self.suspected)
        begun, cpu_s, answers = loop.time(), self.cpu_s(), 0 if load is None else load.so_far().answers
        await asyncio.sleep(seconds)
        num = 0 if load is None else load.so_far().answers - answers
        took_s, cpu_s = loop.time() - begun, self.cpu_s() - cpu_s
        return Window(took_s, cpu_s, num, await asyncio.to_thread(self.suspected) - suspected)


@contextlib.asynccontextmanager
async def measured_router(nodes: int) -> AsyncIterator[MeasuredRouter]:
    """A router beside so many nodes that have all joined."""
    with tempfile.TemporaryDirectory(prefix="many-nodes-") as folder:
        async with control_cluster(ControlCell(nodes, 1), Path(folder)) as cluster:
            await cluster.order("join", nodes=None)
            async with asyncio.timeout(LIMIT_S):
                while cluster.links != nodes:
                    cluster.changed.clear()
                    await cluster.changed.wait()
            yield MeasuredRouter(cluster)


async def measured(sizes: list[int], streams: list[int], users: int, seconds: float, rounds: int) -> dict[int, Rounds]:
    """Returns the rounds of each number of streams, by the number of nodes."""
    found: dict[int, Rounds] = {nodes: {num: [] for num in streams} for nodes in sizes}
    asked = {nodes: count() for nodes in sizes}
    async with contextlib.AsyncExitStack() as stack:
        routers = {nodes: await stack.enter_async_context(measured_router(nodes)) for nodes in sizes}
        for _ in range(rounds):
            for num in streams:
                for nodes, router in routers.items():
                    found[nodes][num].append(await one_round(router, num, users, asked[nodes], seconds))
    return found


async def one_round(router: MeasuredRouter, streams: int, users: int, asked: Iterator[int], seconds: float) -> Round:
    await asyncio.sleep(REST_S)
    quiet = await router.window(seconds)
    async with connections(router.port, connections_for(streams)) as opened:
        load = UsersLoad(opened, users, asked)
        load.start(streams)
        await asyncio.sleep(WARM_S)
        loaded = await router.window(seconds, load)
        tally = await load.stop(LIMIT_S)
    assert not tally.problems, tally.problems[:3]
    return Round(quiet, loaded, await router.window(AWAKE_S))


def middle(rounds: list[Round], of: Callable[[Round], float]) -> float:
    return statistics.median(map(of, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs=2, default=[8, 1000])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    raise_descriptor_limit()
    few, _ = arguments.nodes
    how = arguments.streams, arguments.users, arguments.seconds, arguments.rounds
    figures = uvloop.run(measured(arguments.nodes, *how))
    shown = Table("streams", "nodes", "request, us", "ratio", "with beats, us", "ratio", "requests/s", "suspected")
    for streams in arguments.streams:
        before = figures[few][streams]
        for nodes, each in figures.items():
            cells = [str(streams), f"{nodes:,}"]
            for of in (lambda one: one.request_us, lambda one: one.with_beats_us):
                us = middle(each[streams], of)
                cells += [f"{us:,.0f}", f"{us / middle(before, of):.2f}"]
            rate = middle(each[streams], lambda one: one.requests_s)
            shown.add_row(*cells, f"{rate:,.0f}", f"{sum(one.loaded.suspected for one in each[streams]):,.0f}")
    Console(width=120).print(shown)
    if arguments.json:
        plain = {
            nodes: {num: [asdict(one) for one in rounds] for num, rounds in each.items()} for nodes, each in figures.items()
        }
        arguments.json.write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
