"""Measures what a router's choice of a node costs, and a change of its members, by the number of nodes.

    .venv/bin/python lab/benchmarks/choice.py [--nodes 10 100 300 1000] [--policy affinity] [--json FILE] [--before FILE]

The router's own links, table, chooser and placement run; only the streams to the nodes are replaced, by ones whose nodes are
ready and silent. Times are the least mean of five rounds, in microseconds. `known key`, `new key`: the first two nodes for a
session that was asked for before, or not. `placement`: a generation's first attempt, with its backup. `beat`: what one beat of
a node changes. `link change`: a node drains and is ready again, half of it each. `follow`: one address comes or goes.
`join storm`: one `follow` for each node, until all links are up, in milliseconds. `--json` writes the figures of this revision
to a file, and `--before` shows those of another file beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog
from rich.console import Console
from rich.table import Table

from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.choose import BalanceSettings, Chooser, PolicyChoice
from ryzanstein.router.choose.telemetry import ChoiceTelemetry
from ryzanstein.router.failover.placement import NodePlacement, RunnerPolicy
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.nodes.linker import Linker
from ryzanstein.router.nodes.links.phi_detector import PhiThresholds
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.nodes.table import NodeTable
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.v1 import worker_pb2 as worker

ROUNDS = 5
LEAST_S = 0.02
MODEL = "m"
FIGURES = ("known key", "new key", "placement", "beat", "link change", "follow", "join storm")


def beat(state: Any = worker.NODE_STATE_READY, running: int = 0) -> worker.Beat:
    return worker.Beat(state=state, model=MODEL, context_length=4096, load=worker.Load(running=running, capacity=16))


class Stream:
    """An open stream to a node that sends nothing of itself."""

    def __init__(self, address: str, on_up: Callable[[], None]) -> None:
        self._on_up = on_up
        self.hello = worker.NodeHello(node_id=f"node-{address}", incarnation=address, beat=beat())
        self.receive: Callable[[worker.ConnectResponse], None]

    def send(self, *what: object) -> None: ...

    async def serve(self, receive: Callable[[worker.ConnectResponse], None], pulse: object) -> str:
        self.receive = receive
        self._on_up()
        await asyncio.Event().wait()
        return ""


class Readers:
    """The observer of a generation that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what: None


class ScriptedCluster:
    """A router's nodes, of which `follow` decides how many there are."""

    def __init__(self, policy: Any) -> None:
        self.streams: list[Stream] = []
        self.telemetry = RouterTelemetry()
        self.awake = AwakeClock(lambda lag_s: None, lambda pause_s: None)
        table = NodeTable()
        chooser = Chooser(PolicyChoice(policy), BalanceSettings(), ChoiceTelemetry(self.telemetry))
        self.roster = Roster("r", table, chooser, self.awake)
        self.linker = Linker("r", table, PhiThresholds(jitter_s=3600.0), self.telemetry, self.awake)
        self._keys = count()
        self._num_up, self._wanted, self._all_up = 0, 0, asyncio.Event()

    @contextlib.asynccontextmanager
    async def connect(self, address: str, *what: object) -> AsyncIterator[Stream]:
        self.streams.append(Stream(address, self._up))
        yield self.streams[-1]

    def _up(self) -> None:
        self._num_up += 1
        if self._num_up == self._wanted:
            self._all_up.set()

    async def join(self, num: int) -> float:
        """Lets nodes join one after the other, and returns how many seconds it takes until all are linked."""
        self._wanted, known = num, list[str]()
        begin = time.perf_counter()
        for address in addresses(num):
            known.append(address)
            self.linker.follow(known)
            await asyncio.sleep(0)
        await self._all_up.wait()
        return time.perf_counter() - begin

    def rank(self, session: str) -> None:
        ranking = self.roster.rank(MODEL, self.roster.affinity_of(request(session)), ())
        assert ranking.node_ids[0] != ranking.node_ids[1]

    def new(self) -> str:
        return f"session {next(self._keys)}"

    def place(self, session: str) -> None:
        generation = Generation("g", request(session), Readers())  # type: ignore[arg-type]
        placement = NodePlacement(generation, self.roster, RunnerPolicy(), self.telemetry)
        node_id = at_once(placement.first())
        placement.placed(node_id)
        assert placement.backup(node_id) is not None
        assert placement.previous(node_id) is None

    def beat(self, number: int) -> None:
        self.streams[0].receive(worker.ConnectResponse(beat=beat(running=number % 16)))

    def change(self, number: int) -> None:
        state = worker.NODE_STATE_READY if number % 2 else worker.NODE_STATE_DRAINING
        self.streams[0].receive(worker.ConnectResponse(beat=beat(state)))


def request(session: str) -> GenerationRequest:
    return GenerationRequest(MODEL, TextPrompt("hello"), SamplingParams(), session_id=session)


def at_once(waiting: Any) -> str:
    """Returns what a coroutine returns that does not wait."""
    try:
        waiting.send(None)
    except StopIteration as ended:
        return str(ended.value)
    raise AssertionError("no node")


def cost_us(work: Callable[[int], object]) -> float:
    """Returns the least mean time of `work`, which gets 0, 1, 2, ..."""
    numbers, best, times = count(), float("inf"), 1
    rounds = 0
    while rounds < ROUNDS:
        begin = time.perf_counter()
        for _ in range(times):
            work(next(numbers))
        took_s = time.perf_counter() - begin
        if took_s < LEAST_S and times < 1000:
            times *= 2
            continue
        best, rounds = min(best, took_s / times), rounds + 1
    return best * 1e6


def addresses(num: int) -> Iterator[str]:
    return (f"10.0.{number // 250}.{number % 250}:1" for number in range(num))


async def measured(num: int, policy: str) -> dict[str, float]:
    cluster = ScriptedCluster(policy)
    with patch("ryzanstein.router.nodes.links.link.connect", cluster.connect):
        join_ms = 1e3 * await cluster.join(num)
        some = list(addresses(num))
        more = [[*some, "10.9.9.9:1"], some]
        figures = (
            cost_us(lambda number: cluster.rank("known")),
            cost_us(lambda number: cluster.rank(cluster.new())),
            cost_us(lambda number: cluster.place("known")),
            cost_us(cluster.beat),
            cost_us(cluster.change),
            cost_us(lambda number: cluster.linker.follow(more[number % 2])),
            join_ms,
        )
        await cluster.linker.close()
    await cluster.telemetry.background.close()
    cluster.awake.close()
    return dict(zip(FIGURES, figures, strict=True))


def table(figures: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> Table:
    shown = Table("", *(f"{num} nodes" for num in figures), title="before -> now, us; join storm in ms" if before else "us")
    for name in FIGURES:
        cells = [
            f"{before[num][name]:,.0f} -> {each[name]:,.0f}" if num in before else f"{each[name]:,.0f}"
            for num, each in figures.items()
        ]
        shown.add_row(name, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--policy", default="affinity")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    figures = {str(num): asyncio.run(measured(num, arguments.policy)) for num in arguments.nodes}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))
    Console(width=120).print(table(figures, json.loads(arguments.before.read_text()) if arguments.before else {}))


if __name__ == "__main__":
    main()
