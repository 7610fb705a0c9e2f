"""The phases of a cell, one after the other on the same cluster."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from ryzanstein.lab.bench.control.cluster import ControlCluster
from ryzanstein.lab.bench.control.plan import ControlCell, ControlPlan
from ryzanstein.lab.bench.control.samples import sampled, used
from ryzanstein.lab.bench.control.traffic_shares import traffic_shares
from ryzanstein.lab.bench.router.load.call_end import by_reason
from ryzanstein.lab.bench.router.load.connections import StreamLoad, connections
from ryzanstein.lab.bench.router.scripted.script import Script

_TOKENS, _STEP_S = 50, 0.1
_CHANGE_S = 1.0
_REST_S = 14.0  # until links without work are quiet


@dataclass(slots=True)
class PhaseRow:
    """What a phase finds out besides what the processes used. `converged_s` None: it was not a wait, or took too long."""

    name: str
    waits: bool
    converged_s: float | None = None
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.waits and self.converged_s is None


class ControlPhases:
    """Runs the phases one after the other. `rows` has what each measured; `tell` gets a line for each."""

    def __init__(self, cell: ControlCell, plan: ControlPlan, cluster: ControlCluster, tell: Callable[[str], None]) -> None:
        self._cell, self._plan, self._cluster, self._tell = cell, plan, cluster, tell
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    async def run(self) -> None:
        """Runs all of them, or those until the cluster does not become what it should be."""
        for phase in (self._join, self._idle, self._busy, self._changes, self._leave, self._restart, self._partition):
            await phase()
            if self.failed:
                return

    async def _join(self) -> None:
        async with self._phase("join", waits=True) as row:
            await self._cluster.order("join", nodes=None)
            await self._converge(row, self._whole)

    async def _idle(self) -> None:
        await asyncio.sleep(_REST_S)
        async with self._phase("idle"):
            await asyncio.sleep(self._plan.window_s)

    async def _busy(self) -> None:
        """All nodes report work, and some answers stream. They end with the phase."""
        script = Script(_TOKENS, _STEP_S, self._cell.model_names[0])
        async with contextlib.AsyncExitStack() as stack:
            ports = [router.port for router in self._cluster.routers]
            opened = [(await stack.enter_async_context(connections(port, 1)))[0] for port in ports]
            await self._cluster.order("work", busy=True)
            load = StreamLoad(opened, script)
            load.start(min(self._plan.streams, self._cell.nodes))
            async with self._phase("busy") as row:
                before = load.so_far()
                await asyncio.sleep(self._plan.window_s)
                count = load.so_far().since(before)
                row.further |= {"streams": len(load.running), "tokens_per_s": count.tokens / self._plan.window_s}
            await self._cluster.order("work", busy=False)
            tally = await load.stop(self._plan.limit_s)
            self.rows[-1]["stream_problems"] = by_reason(tally.problems)

    async def _changes(self) -> None:
        """One node a second leaves, and is back in the next."""
        times: list[float] = []
        async with self._phase("changes", waits=True) as row:
            loop = asyncio.get_running_loop()
            end, number = loop.time() + self._plan.window_s, 0
            while loop.time() < end:
                begun, node = loop.time(), number // 2 % self._cell.nodes
                away = number % 2 == 0
                await self._cluster.order("leave" if away else "join", nodes=[node])
                if (took_s := await self._until(lambda: self._seen_by_all(self._cell.nodes - away))) is None:  # noqa: B023
                    break
                times.append(took_s)
                number += 1
                await asyncio.sleep(max(0.0, begun + _CHANGE_S - loop.time()))
            else:
                await self._cluster.order("join", nodes=None)
                if await self._until(self._whole) is not None:
                    row.converged_s = max(times)
            row.further |= {"changes": len(times), "change_s": sorted(round(each, 3) for each in times)}

    async def _leave(self) -> None:
        leaving = max(1, int(self._cell.nodes * self._plan.leaving))
        spread = [number * self._cell.nodes // leaving for number in range(leaving)]
        async with self._phase("leave", waits=True) as row:
            await self._cluster.order("leave", nodes=spread)
            left = self._cell.nodes - leaving
            await self._converge(row, lambda: self._seen_by_all(left) and self._linked(left))
            row.further["nodes_left"] = leaving
        async with self._phase("return", waits=True) as row:
            await self._cluster.order("join", nodes=None)
            await self._converge(row, self._whole)

    async def _restart(self) -> None:
        """The orchestrator is killed and started again at once, with its database."""
        cluster, seen = self._cluster, self._cluster.restarts_seen
        await cluster.order("mark")
        async with self._phase("orchestrator killed", waits=True) as row:
            fewest = _Fewest(lambda: cluster.links)
            await cluster.orchestrator.end(signal.SIGKILL)
            await cluster.orchestrator.start()

            def back() -> bool:
                fewest.look()
                rejoined = cluster.rejoined == self._cell.nodes
                return rejoined and cluster.restarts_seen > seen and self._whole()

            await self._converge(row, back)
            row.further["fewest_links"] = fewest.value

    async def _partition(self) -> None:
        """Half of the nodes stand still (SIGSTOP), which to the others is what a partition is: silence."""
        half = self._cluster.nodes[: len(self._cluster.nodes) // 2]
        left = self._cell.nodes - sum(len(span) for span in self._cell.spans[: len(half)])
        try:
            async with self._phase("half silent", waits=True) as row:
                begun = asyncio.get_running_loop().time()
                for each in half:
                    each.freeze()
                await self._converge(row, lambda: self._seen_by_all(left))
                await asyncio.sleep(max(0.0, begun + self._plan.silence_s - asyncio.get_running_loop().time()))
        finally:
            for each in half:
                each.thaw()
        async with self._phase("half back", waits=True) as row:
            await self._converge(row, self._whole)

    @contextlib.asynccontextmanager
    async def _phase(self, name: str, *, waits: bool = False) -> AsyncIterator[PhaseRow]:
        """Measures a block. A wait that did not end in time fails the cell."""
        self._tell(f"{self._cell}: {name}")
        row, cluster = PhaseRow(name, waits), self._cluster
        before = await sampled(cluster, traffic_shares(self._cell, cluster), metrics_first=True)
        yield row
        after = await sampled(cluster, traffic_shares(self._cell, cluster), metrics_first=False)
        if row.failed:
            self.failed.append(f"{self._cell}: {name} did not converge within {self._plan.limit_s:g} s: {self._state()}")
        what = {"phase": name, "seconds": round(after.at - before.at, 3), "converged_s": row.converged_s, **row.further}
        self.rows.append({**self._head(), **what, "processes": used(before, after)})

    def _head(self) -> dict[str, Any]:
        cell = self._cell
        return {
            "nodes": cell.nodes,
            "models": cell.models,
            "routers": cell.routers,
            "real_routers": cell.real_routers,
            "watchers": cell.watchers,
        }

    async def _converge(self, row: PhaseRow, condition: Callable[[], bool]) -> None:
        row.converged_s = await self._until(condition)

    async def _until(self, condition: Callable[[], bool]) -> float | None:
        """Returns the seconds until the stand-ins report that the condition holds; None: too many."""
        changed, loop = self._cluster.changed, asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout(self._plan.limit_s):
                while not condition():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return None
        return round(loop.time() - begun, 3)

    def _whole(self) -> bool:
        """Whether every node is registered, linked by every real router for each model, and in every watcher's view."""
        nodes = self._cell.nodes
        return self._cluster.registered == nodes and self._linked(nodes) and self._seen_by_all(nodes)

    def _linked(self, nodes: int) -> bool:
        return self._cluster.links == nodes * self._cell.models * self._cell.real_routers

    def _seen_by_all(self, nodes: int) -> bool:
        seen = self._cluster.seen
        return len(seen) == self._cell.watchers and set(seen) == {nodes}

    def _state(self) -> str:
        cluster = self._cluster
        return f"{cluster.registered} registered, {cluster.links} links, views of {cluster.seen}"


class _Fewest:
    """The smallest value that was seen."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self.value = read()

    def look(self) -> None:
        self.value = min(self.value, self._read())
