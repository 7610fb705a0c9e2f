"""The cluster of one cell: the orchestrator and routers as they are, and the processes of stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ryzanstein import errors
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.lab.bench.control.plan import ControlCell
from ryzanstein.lab.bench.control.stand_in import StandInProcess, stand_ins

_START_S, _STOP_S = 60.0, 5.0


@dataclass(slots=True)
class MeasuredService:
    """A real service, which can be killed and started again at the same ports."""

    name: str
    command: Sequence[str]
    port: int
    metrics_port: int
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*self.command, stdout=log, stderr=log)

    async def listening(self) -> None:
        """Returns when its port accepts connections. Raises UNAVAILABLE if it ends or takes too long."""
        deadline = asyncio.get_running_loop().time() + _START_S
        while self.process is not None and self.process.returncode is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.02)
        raise errors.unavailable("NOT_STARTED", f"{self.name} did not start: {self._last_lines()}")

    async def end(self, number: signal.Signals) -> None:
        """Sends a signal and waits for the end; SIGKILL follows if it does not come."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(number)
        try:
            await asyncio.wait_for(self.process.wait(), _STOP_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def _last_lines(self) -> str:
        return self.log.read_text(errors="replace")[-1000:] if self.log.exists() else ""


@dataclass(slots=True)
class ControlCluster:
    """All processes of a cell. `changed` is set with each report of a stand-in."""

    orchestrator: MeasuredService
    routers: list[MeasuredService]
    nodes: list[StandInProcess] = field(default_factory=list)
    watchers: StandInProcess | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def services(self) -> list[MeasuredService]:
        return [self.orchestrator, *self.routers]

    @property
    def stand_ins(self) -> list[StandInProcess]:
        return [*self.nodes, *([] if self.watchers is None else [self.watchers])]

    @property
    def registered(self) -> int:
        return sum(each.state.get("registered", 0) for each in self.nodes)

    @property
    def rejoined(self) -> int:
        return sum(each.state.get("rejoined", 0) for each in self.nodes)

    @property
    def links(self) -> int:
        return sum(each.state.get("links", 0) for each in self.nodes)

    @property
    def seen(self) -> list[int]:
        """Returns the nodes in the view of each watcher."""
        return [] if self.watchers is None else self.watchers.state.get("nodes", [])

    @property
    def restarts_seen(self) -> int:
        """Returns how many restarts of the orchestrator the last watcher has noticed."""
        return 0 if self.watchers is None else min(self.watchers.state.get("restarts_seen", [0]))

    async def order(self, do: str, **what: object) -> None:
        for each in self.nodes:
            await each.order(do, **what)


@contextlib.asynccontextmanager
async def control_cluster(cell: ControlCell, folder: Path) -> AsyncIterator[ControlCluster]:
    """Starts everything but the nodes' membership. Raises UNAVAILABLE if something does not start."""
    cluster = ControlCluster(*_services(cell, folder))
    address = f"127.0.0.1:{cluster.orchestrator.port}"
    async with contextlib.AsyncExitStack() as stack:
        for service in cluster.services:
            stack.push_async_callback(service.end, signal.SIGTERM)
            await service.start()
        watching = ("watchers", "watchers", (address, str(cell.watchers), str(folder)), cluster.changed.set)
        cluster.watchers = await stack.enter_async_context(stand_ins(*watching))
        for number, span in enumerate(cell.spans):
            arguments = (address, str(span.start), str(len(span)), ",".join(cell.model_names))
            process = stand_ins(f"nodes-{number}", "nodes", arguments, cluster.changed.set)
            cluster.nodes.append(await stack.enter_async_context(process))
        for service in cluster.services:
            await service.listening()
        await _reported(cluster)
        yield cluster


async def _reported(cluster: ControlCluster) -> None:
    """Returns when every process of stand-ins takes orders and the watchers have a view."""
    assert cluster.watchers is not None
    try:
        async with asyncio.timeout(_START_S):
            while not all(each.state for each in (*cluster.nodes, cluster.watchers)):
                cluster.changed.clear()
                await cluster.changed.wait()
    except TimeoutError:
        raise errors.unavailable("NOT_STARTED", "the stand-ins did not start") from None


def _program(name: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"ryzanstein.{name}", "--log-level", "warning"]


def _services(cell: ControlCell, folder: Path) -> tuple[MeasuredService, list[MeasuredService]]:
    ports = free_ports(2 + 2 * cell.real_routers)
    where = ["--grpc-port", str(ports[0]), "--metrics-port", str(ports[1]), "--database", str(folder / "orchestrator.sqlite")]
    orchestrator = MeasuredService(
        "orchestrator", [*_program("orchestrator"), *where], ports[0], ports[1], folder / "orchestrator.log"
    )
    routers = []
    for number in range(cell.real_routers):
        name, port, metrics_port = f"router-{number}", ports[2 + 2 * number], ports[3 + 2 * number]
        flags = ["--no-http", "--session-store", "memory", "--router-id", name, "--state-dir", str(folder / name)]
        flags += ["--grpc-port", str(port), "--metrics-port", str(metrics_port), "--orchestrator", f"127.0.0.1:{ports[0]}"]
        routers.append(MeasuredService(name, [*_program("router"), *flags], port, metrics_port, folder / f"{name}.log"))
    return orchestrator, routers
