"""A TCP proxy that delays or swallows data.

Run it as `python -P -m ryzanstein.lab.chaos.machines.proxy LISTEN TARGET` (host:port each).

It is a separate process, so that a busy laboratory does not lengthen the delay. Commands arrive on
standard input, one per line: `delay SECONDS` (each way), `blackhole` (read and discard), `pass` (no
delay). It prints `ready` once it listens and `done` after each command, and ends with its standard
input. Bytes keep their order. The amount that waits is bounded; beyond it the sender has to wait.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass

from ryzanstein.addresses import split_address

_CHUNK_BYTES = 64 * 2**10
_MAX_CHUNKS_UNDER_WAY = 1024
_CONNECT_S = 5.0


@dataclass(slots=True)
class LineWeather:
    """The current state of the connection path; connections check it for every chunk."""

    delay_s: float = 0.0
    blackhole: bool = False

    def obey(self, command: str) -> None:
        """Carries out a command. Raises ValueError for an unknown one or a negative delay."""
        match command.split():
            case ["pass"]:
                self.delay_s, self.blackhole = 0.0, False
            case ["blackhole"]:
                self.blackhole = True
            case ["delay", seconds] if float(seconds) >= 0:
                self.delay_s, self.blackhole = float(seconds), False
            case _:
                raise ValueError(f"unknown command {command!r}")


class ProxyProcess:
    """The proxy. It serves until its server is closed."""

    def __init__(self, target: tuple[str, int], weather: LineWeather) -> None:
        self._target = target
        self._weather = weather

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Returns the listening server. Close it."""
        return await asyncio.start_server(self._accept, host, port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, there_writer))
                ways.create_task(self._carry(there_reader, writer))
        except* (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()
            there_writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction of one connection until its end.

        A reset is passed on as a reset: EOFError ends both directions.
        """
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS_UNDER_WAY)
        async with asyncio.TaskGroup() as halves:
            halves.create_task(self._take(reader, under_way))
            halves.create_task(self._deliver(under_way, writer))

    async def _take(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        while chunk := await reader.read(_CHUNK_BYTES):
            if not self._weather.blackhole:
                await under_way.put((loop.time() + self._weather.delay_s, chunk))
        await under_way.put((loop.time() + self._weather.delay_s, b""))

    async def _deliver(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, chunk = await under_way.get()
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not chunk:
                raise EOFError
            writer.write(chunk)
            await writer.drain()


async def run(listen: tuple[str, int], target: tuple[str, int]) -> None:
    """Runs until standard input ends."""
    weather = LineWeather()
    server = await ProxyProcess(target, weather).serve(*listen)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print("ready", flush=True)
    while line := await commands.readline():
        weather.obey(line.decode())
        print("done", flush=True)
    server.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(run(split_address(sys.argv[1]), split_address(sys.argv[2])))
