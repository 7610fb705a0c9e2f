"""A server of ours as an engine group: started, reached like any other, ended with all of its processes."""

from __future__ import annotations

import asyncio
import mmap
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import structlog

from ryzanstein.worker.engines.child import keeper, litter
from ryzanstein.worker.engines.remote.finding import RemoteSpec
from ryzanstein.worker.engines.remote.group import RemoteGroup
from ryzanstein.worker.supervision.group import EngineModel, GroupEvents, LossCause, RankLoss, RankProgress, RanksLost
from ryzanstein.worker.supervision.messages import EngineMessage, RankReady
from ryzanstein.worker.supervision.stacks import ProcessStacks, kernel_stacks

log = structlog.get_logger(__name__)

_END_S = 6 * keeper.GRACE_S
_LOOK_S = 0.1
_WORKING = "VLLM::"
"""How vLLM names its processes that compute."""


class ChildSpec(NamedTuple):
    """How a server is started, in a folder of its own: with which command and environment, and how it is spoken to."""

    command: Callable[[EngineModel, Path], Sequence[str]]
    environment: Callable[[Path], Mapping[str, str]]
    remote: Callable[[Path], RemoteSpec]


class ChildGroup:
    """An `EngineGroup` whose server lives as long as the group."""

    def __init__(self, spec: ChildSpec, model: EngineModel, events: GroupEvents) -> None:
        self._spec, self._model = spec, model
        self._folder = Path(tempfile.mkdtemp(prefix="ryzanstein-engine-"))
        self._remote = RemoteGroup(spec.remote(self._folder), model, events, lambda: None)
        self.lost: asyncio.Future[RankLoss] = self._remote.lost
        self._before = litter.present()
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> list[RankReady]:
        """See `EngineGroup.start`."""
        command = self._spec.command(self._model, self._folder)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", keeper.__file__, *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=2,  # what it prints is no line of our log, and stands beside it
            env=self._spec.environment(self._folder),
            cwd=self._folder,
            start_new_session=True,  # it ends the server after whatever ends us, and us alone
        )
        log.info("engine started", pid=self._process.pid, command=" ".join(command))
        self._watching = asyncio.create_task(self._watch(self._process))
        self._watching.add_done_callback(self._on_unwatched)
        starting = asyncio.ensure_future(self._remote.start())
        either: list[asyncio.Future[Any]] = [starting, self.lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            raise RanksLost(self.lost.result())
        return starting.result()

    def send(self, message: EngineMessage) -> None:
        self._remote.send(message)

    def slab(self, size_bytes: int) -> mmap.mmap:
        return self._remote.slab(size_bytes)

    def progress(self) -> list[RankProgress]:
        return self._remote.progress()

    def slowness(self) -> Mapping[int, float]:
        return self._remote.slowness()

    def resident_bytes(self) -> Sequence[int]:
        return [sum(_memory(process, "rss") for process in self._processes())]

    def private_bytes(self) -> Sequence[int]:
        return [sum(_memory(process, "rss") - _memory(process, "shared") for process in self._processes())]

    async def stacks(self, watched_s: float) -> list[ProcessStacks]:
        """See `EngineGroup.stacks`. Its processes are not ours to ask for frames: what the kernel says is known."""
        return await kernel_stacks([(_name(process), process.pid) for process in self._processes()], watched_s)

    async def end(self, *, graceful: bool) -> None:
        """Ends all processes of the server; returns when none is left. Without grace they are killed at once."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            await self._remote.end(graceful=graceful)
        finally:
            await self._end_processes(graceful=graceful)
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _end_processes(self, *, graceful: bool) -> None:
        process = self._process
        if process is None:
            return
        if not graceful:
            for each in self._processes():
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            log.error("engine does not end", pid=process.pid)
            process.kill()
            await process.wait()
            await asyncio.to_thread(litter.remove_new, self._before)

    def _processes(self) -> list[psutil.Process]:
        """Returns the server's processes, without the one that keeps them."""
        if self._process is None or self._process.returncode is not None:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Reports the loss as soon as a process that computes is gone, or the whole server."""
        exited = asyncio.ensure_future(process.wait())
        seen: dict[int, str] = {}
        while not self.lost.done():
            await asyncio.wait([exited], timeout=_LOOK_S)
            if exited.done():
                self._lose(f"the engine {_how(exited.result())}")
                return
            living = dict(await asyncio.to_thread(self._computing))
            gone = [name for pid, name in seen.items() if pid not in living]
            if gone:
                self._lose(f"the engine's process {gone[0]} has ended")
                return
            seen = living

    def _on_unwatched(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            log.error("watching an engine failed", exc_info=error)
            self._lose(f"the watch of the engine failed: {error!r}")

    def _computing(self) -> list[tuple[int, str]]:
        found = []
        for process in self._processes():
            with suppress(psutil.NoSuchProcess, OSError):
                name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                if name.startswith(_WORKING) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process.pid, name))
        return found

    def _lose(self, text: str) -> None:
        if not self.lost.done():
            self.lost.set_result(RankLoss(0, LossCause.DIED, text))


class ChildEngines:
    """An `EngineFactory` whose groups each start a server."""

    def __init__(self, spec: ChildSpec, model: EngineModel, events: GroupEvents) -> None:
        self._spec, self._model, self._events = spec, model, events

    @property
    def condemned(self) -> bool:
        """See `EngineFactory.condemned`: what hangs here is ended by ourselves."""
        return False

    @property
    def model(self) -> str:
        return self._model.path

    def make(self) -> ChildGroup:
        """See `EngineFactory.make`. OSError: there is no room for its folder."""
        return ChildGroup(self._spec, self._model, self._events)

    async def lost(self, loss: RankLoss, *, served: bool) -> None:
        """See `EngineFactory.lost`: nothing outlives a group."""

    async def close(self) -> None:
        """See `EngineFactory.close`."""


def _how(code: int) -> str:
    return f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _memory(process: psutil.Process, name: str) -> int:
    try:
        return int(getattr(process.memory_info(), name))
    except psutil.NoSuchProcess:
        return 0
