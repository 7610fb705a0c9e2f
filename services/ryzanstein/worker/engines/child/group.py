"""A server of ours as an engine group: started, reached like any other, ended with all of its processes.

Where it can sleep, the server of a model that sleeps outlives its group, without the accelerator's memory.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import structlog

from ryzanstein.worker.engines.child.server import ChildServer
from ryzanstein.worker.engines.remote.finding import RemoteSpec
from ryzanstein.worker.engines.remote.group import RemoteGroup
from ryzanstein.worker.engines.remote.http.faults import EngineFault
from ryzanstein.worker.supervision.group import EngineModel, GroupEvents, LossCause, RankLoss, RankProgress, RanksLost, RankStep
from ryzanstein.worker.supervision.messages import EngineMessage, RankReady
from ryzanstein.worker.supervision.stacks import ProcessStacks, kernel_stacks

log = structlog.get_logger(__name__)


class ChildSpec(NamedTuple):
    """How a server is started, in a folder of its own: with which command and environment, and how it is spoken to.

    `sleeps`: it can free its memory without ending.
    """

    command: Callable[[EngineModel, Path], Sequence[str]]
    environment: Callable[[Path], Mapping[str, str]]
    remote: Callable[[Path], RemoteSpec]
    sleeps: bool = False


class ChildGroup:
    """An `EngineGroup` of a server that is started, or woken. `keep` is given a server that served until a graceful end."""

    def __init__(
        self, spec: ChildSpec, model: EngineModel, events: GroupEvents, server: ChildServer, keep: Callable[[ChildServer], None]
    ) -> None:
        self._spec, self._model, self._server, self._keep = spec, model, server, keep
        self._remote = RemoteGroup(spec.remote(server.folder), model, events, lambda: None)
        self.lost: asyncio.Future[RankLoss] = self._remote.lost
        self._watching: asyncio.Task[None] | None = None
        self._served = False

    async def start(self) -> list[RankReady]:
        """See `EngineGroup.start`."""
        if not self._server.started:
            command = self._spec.command(self._model, self._server.folder)
            await self._server.start(command, self._spec.environment(self._server.folder))
        self._watching = asyncio.create_task(self._server.watch(self._lose))
        self._watching.add_done_callback(self._on_unwatched)
        starting = asyncio.ensure_future(self._begin())
        either: list[asyncio.Future[Any]] = [starting, self.lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            raise RanksLost(self.lost.result())
        return starting.result()

    async def _begin(self) -> list[RankReady]:
        if self._server.asleep:
            client = self._spec.remote(self._server.folder).new_client()
            try:
                await self._server.wake(client)
            except EngineFault as error:
                raise RanksLost(RankLoss(0, LossCause.START, f"the engine does not wake: {error}")) from None
            finally:
                await client.close()
        ready = await self._remote.start()
        self._served = True
        return ready

    def send(self, message: EngineMessage) -> None:
        self._remote.send(message)

    def slab(self, size_bytes: int) -> mmap.mmap:
        return self._remote.slab(size_bytes)

    async def obeyed(self) -> None:
        await self._remote.obeyed()

    def progress(self) -> list[RankProgress]:
        return self._remote.progress()

    def steps(self, step: int) -> Sequence[RankStep]:
        return self._remote.steps(step)

    def slowness(self) -> Mapping[int, float]:
        return self._remote.slowness()

    def resident_bytes(self) -> Sequence[int]:
        return [sum(_memory(process, "rss") for process in self._server.processes())]

    def private_bytes(self) -> Sequence[int]:
        return [sum(_memory(process, "rss") - _memory(process, "shared") for process in self._server.processes())]

    async def stacks(self, watched_s: float) -> list[ProcessStacks]:
        """See `EngineGroup.stacks`. Its processes are not ours to ask for frames: what the kernel says is known."""
        return await kernel_stacks([(_name(process), process.pid) for process in self._server.processes()], watched_s)

    async def end(self, *, graceful: bool) -> None:
        """See `EngineGroup.end`. A server that may sleep is kept."""
        sound = graceful and self._served and self._server.runs and not self.lost.done()
        if self._watching is not None:
            self._watching.cancel()
        try:
            await self._remote.end(graceful=graceful)
        finally:
            if sound and self._spec.sleeps:
                self._keep(self._server)
            else:
                await self._server.end(graceful=graceful)

    def _on_unwatched(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            log.error("watching an engine failed", exc_info=error)
            self._lose(f"the watch of the engine failed: {error!r}")

    def _lose(self, text: str) -> None:
        if not self.lost.done():
            self.lost.set_result(RankLoss(0, LossCause.DIED, text))


class ChildEngines:
    """An `EngineFactory` whose groups each start a server, or wake the one that was put to sleep."""

    def __init__(self, spec: ChildSpec, model: EngineModel, events: GroupEvents) -> None:
        self._spec, self._model, self._events = spec, model, events
        self._kept: ChildServer | None = None

    @property
    def condemned(self) -> bool:
        """See `EngineFactory.condemned`: what hangs here is ended by ourselves."""
        return False

    @property
    def model(self) -> str:
        return self._model.path

    def make(self) -> ChildGroup:
        """See `EngineFactory.make`. OSError: there is no room for its folder."""
        kept, self._kept = self._kept, None
        if kept is not None and not kept.runs:  # it died in its sleep
            kept.remove_folder()
            kept = None
        return ChildGroup(self._spec, self._model, self._events, kept or ChildServer(), self._keep)

    async def lost(self, loss: RankLoss, *, served: bool) -> None:
        """See `EngineFactory.lost`: nothing that was lost outlives a group."""

    async def close(self, *, sleeps: bool = False) -> None:
        """See `EngineFactory.close`. A server that does not fall asleep is ended."""
        if (server := self._kept) is None or (sleeps and server.asleep):
            return
        if not (sleeps and await self._asleep(server)):
            await server.end(graceful=True)
            self._kept = None

    def _keep(self, server: ChildServer) -> None:
        self._kept = server

    async def _asleep(self, server: ChildServer) -> bool:
        client = self._spec.remote(server.folder).new_client()
        try:
            await server.sleep(client)
        except EngineFault as error:
            log.warning("engine does not sleep; it is ended", reason=str(error))
            return False
        finally:
            await client.close()
        log.info("engine sleeps", folder=str(server.folder))
        return True


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
