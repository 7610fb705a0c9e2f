"""The processes of a server that the agent starts: one command, all that comes from it, and what it leaves behind."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from ryzanstein.worker.engines.child import keeper, litter
from ryzanstein.worker.engines.remote.http.client import EngineClient

log = structlog.get_logger(__name__)

_END_S = 6 * keeper.GRACE_S
_LOOK_S = 0.1
_WORKING = "VLLM::"
"""How vLLM names its processes that compute."""
_SLEEP_S = 120.0
"""Weights are copied out of the accelerator's memory, or back into it."""


class ChildServer:
    """A server, started once. `folder` is its own, and goes with it."""

    def __init__(self) -> None:
        """Raises OSError: there is no room for its folder."""
        self.folder = Path(tempfile.mkdtemp(prefix="ryzanstein-engine-"))
        self.asleep = False
        self._before = litter.present()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises OSError."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", keeper.__file__, *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=2,  # what it prints is no line of our log, and stands beside it
            env=environment,
            cwd=self.folder,
            start_new_session=True,  # it ends the server after whatever ends us, and us alone
        )
        log.info("engine started", pid=self._process.pid, command=" ".join(command))

    async def watch(self, lose: Callable[[str], None]) -> None:
        """Says so once when the server is gone, or a process of it that computes."""
        assert self._process is not None
        exited = asyncio.ensure_future(self._process.wait())
        seen: dict[int, str] = {}
        while True:
            await asyncio.wait([exited], timeout=_LOOK_S)
            if exited.done():
                return lose(f"the engine {_how(exited.result())}")
            living = dict(await asyncio.to_thread(self._computing))
            if gone := [name for pid, name in seen.items() if pid not in living]:
                return lose(f"the engine's process {gone[0]} has ended")
            seen = living

    async def sleep(self, client: EngineClient) -> None:
        """Frees the accelerator's memory; the weights stay in the machine's. Raises EngineFault."""
        await client.post("/sleep?level=1", {}, _SLEEP_S)
        self.asleep = True

    async def wake(self, client: EngineClient) -> None:
        """Raises EngineFault."""
        await client.post("/wake_up", {}, _SLEEP_S)
        self.asleep = False

    def processes(self) -> list[psutil.Process]:
        """Returns the server's processes, without the one that keeps them."""
        if self._process is None or not self.runs:
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    async def end(self, *, graceful: bool) -> None:
        """Ends all processes; returns when none is left. Without grace they are killed at once."""
        try:
            await self._end_processes(graceful=graceful)
        finally:
            await asyncio.to_thread(self.remove_folder)

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _end_processes(self, *, graceful: bool) -> None:
        process = self._process
        if process is None:
            return
        if not graceful:
            for each in self.processes():
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

    def _computing(self) -> list[tuple[int, str]]:
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, OSError):
                name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                if name.startswith(_WORKING) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process.pid, name))
        return found


def _how(code: int) -> str:
    return f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
