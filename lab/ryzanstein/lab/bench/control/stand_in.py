"""A process of stand-ins, as the benchmark sees it: it gets orders, and its newest state is known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from ryzanstein.lab.bench.control.standins.traffic import Traffic

_STOP_S = 10.0
_LINE_BYTES = 2**20


class StandInProcess:
    """`state` is what it reported last, `latest_s` how late the latest of its reports was."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self.state: dict[str, Any] = {}
        self.latest_s = 0.0

    async def read(self, changed: Callable[[], None]) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.state = json.loads(line)
            self.latest_s = max(self.latest_s, self.state["late_s"])
            changed()

    async def order(self, do: str, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        await self.process.stdin.drain()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def traffic(self, name: str) -> Traffic:
        return Traffic(**self.state.get(name, {}))


@contextlib.asynccontextmanager
async def stand_ins(
    name: str, module: str, arguments: tuple[str, ...], changed: Callable[[], None]
) -> AsyncIterator[StandInProcess]:
    """Runs a program of `standins`, and kills it if it does not end when its orders do."""
    program = (sys.executable, "-P", "-m", f"ryzanstein.lab.bench.control.standins.{module}", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, limit=_LINE_BYTES)
    found = StandInProcess(name, process)
    reader = asyncio.create_task(found.read(changed))
    try:
        yield found
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            found.thaw()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        reader.cancel()
