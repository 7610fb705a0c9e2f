"""The systems between the clients and the node: nothing, a proxy, or the router."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ryzanstein import errors
from ryzanstein.lab.bench.router.proxies import PROXIES

DIRECT = "direct"
ROUTER = "ryzanstein"
SYSTEMS = (ROUTER, *PROXIES, DIRECT)
_START_S = 60.0
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class System:
    """A system that takes calls at `port`.

    `process` is None for `direct`, where clients call the node itself. `headers` are sent with each request,
    with `tls` if its port speaks TLS.
    """

    name: str
    port: int
    process: psutil.Process | None
    headers: tuple[tuple[str, str], ...] = ()
    tls: ssl.SSLContext | None = None

    def cpu_s(self) -> float:
        return cpu_s(self.process)

    def rss_bytes(self) -> int:
        """Returns the resident memory of all its processes."""
        return sum(one.memory_info().rss for one in _family(self.process))


def cpu_s(process: psutil.Process | None) -> float:
    """Returns user and system time of a process and its children."""
    times = [one.cpu_times() for one in _family(process)]
    return sum(time.user + time.system for time in times)


def _family(process: psutil.Process | None) -> list[psutil.Process]:
    return [] if process is None else [process, *process.children(recursive=True)]


@dataclass(frozen=True, slots=True)
class BenchNode:
    """The scripted node's process and port."""

    port: int
    process: psutil.Process


@contextlib.asynccontextmanager
async def running_node(tls_dir: Path | None = None) -> AsyncIterator[BenchNode]:
    """Runs the scripted node, with TLS if there are certificates. Raises UNAVAILABLE if it does not start."""
    program = (sys.executable, "-P", "-m", "ryzanstein.lab.bench.router.scripted.node")
    command = program if tls_dir is None else (*program, str(tls_dir))
    async with _running(command, stdout=asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        async with asyncio.timeout(_START_S):
            line = await process.stdout.readline()
        if not line:
            raise errors.unavailable("NOT_STARTED", "the scripted node did not start")
        yield BenchNode(int(line), psutil.Process(process.pid))


@contextlib.asynccontextmanager
async def running_system(name: str, node_port: int) -> AsyncIterator[System]:
    """Runs one of `SYSTEMS` in front of the node.

    Raises UNAVAILABLE if it is not installed or does not start.
    """
    if name == DIRECT:
        yield System(name, node_port, None)
        return
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        async with _running(_command(name, port, node_port, Path(folder))) as process:
            await _listening(name, port, process)
            yield System(name, port, psutil.Process(process.pid))


def _command(name: str, port: int, node_port: int, folder: Path) -> list[str]:
    if name != ROUTER:
        return PROXIES[name].command(PROXIES[name].start, port, node_port, folder)
    flags = ("--no-http", "--session-store", "memory", "--log-level", "warning", "--router-id", "benchmark")
    where = ("--grpc-port", str(port), "--nodes", f"127.0.0.1:{node_port}", "--state-dir", str(folder))
    return [sys.executable, "-P", "-m", "ryzanstein.router", *flags, *where]


@contextlib.asynccontextmanager
async def running_router(
    node_port: int, flags: Sequence[str] = (), headers: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[System]:
    """Runs the router with more settings in front of a node. Raises UNAVAILABLE if it does not start."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix=f"{ROUTER}-") as folder:
        async with _running([*_command(ROUTER, port, node_port, Path(folder)), *flags]) as process:
            await _listening(ROUTER, port, process)
            yield System(ROUTER, port, psutil.Process(process.pid), headers)


@contextlib.asynccontextmanager
async def _running(
    command: Sequence[str], stdout: int = asyncio.subprocess.DEVNULL
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command, stdout=stdout)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _listening(name: str, port: int, process: asyncio.subprocess.Process) -> None:
    """Returns when the port accepts connections. The first request shows whether answers arrive."""
    deadline = asyncio.get_running_loop().time() + _START_S
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise errors.unavailable("NOT_STARTED", f"{name} did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
