"""The proxy delays, swallows, passes on ends and resets, and takes commands as a process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import pytest

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.lab.chaos.machines.child import Child
from ryzanstein.lab.chaos.machines.proxy import LineWeather, ProxyProcess

DELAY_S = 0.15


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    # Clients have closed: what serves them ends by itself, not by the end of the loop.
    serving = asyncio.all_tasks() - {asyncio.current_task()}
    if serving:
        await asyncio.wait(serving, timeout=5)


@pytest.fixture
async def weather() -> LineWeather:
    return LineWeather()


@pytest.fixture
async def port(echo: int, weather: LineWeather) -> AsyncIterator[int]:
    server = await ProxyProcess(("127.0.0.1", echo), weather).serve("127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def round_trip_s(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes = b"ping") -> float:
    began = time.monotonic()
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    return time.monotonic() - began


async def test_it_delays_each_way_and_keeps_the_order(port: int, weather: LineWeather) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await round_trip_s(reader, writer)
    weather.obey(f"delay {DELAY_S}")
    assert await round_trip_s(reader, writer) >= 2 * DELAY_S
    assert await round_trip_s(reader, writer, bytes(range(256)) * 2000) >= 2 * DELAY_S
    weather.obey("pass")
    assert await round_trip_s(reader, writer) < 2 * DELAY_S
    writer.close()


async def test_a_black_hole_takes_everything_and_gives_nothing(port: int, weather: LineWeather) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await round_trip_s(reader, writer)
    weather.obey("blackhole")
    writer.write(b"lost")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reader.read(4)
    weather.obey("pass")
    await round_trip_s(reader, writer, b"seen")
    writer.close()


async def test_an_end_on_one_side_ends_the_other(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await round_trip_s(reader, writer)
    writer.write_eof()
    async with asyncio.timeout(5):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
    writer.close()


async def test_nobody_behind_it_is_a_broken_connection() -> None:
    (nobody,) = free_ports(1)
    async with await ProxyProcess(("127.0.0.1", nobody), LineWeather()).serve("127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        async with asyncio.timeout(5):
            assert await reader.read(1) == b""
        writer.close()


@pytest.mark.parametrize("command", ["", "delay", "delay -1", "delay x", "explode"])
def test_an_unknown_command_is_refused(command: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LineWeather().obey(command)


async def test_as_a_process_it_obeys_its_standard_input(echo: int) -> None:
    (port,) = free_ports(1)
    command = (sys.executable, "-m", "ryzanstein.lab.chaos.machines.proxy", f"127.0.0.1:{port}", f"127.0.0.1:{echo}")
    proxy = Child(command, interactive=True)
    proxy.start()
    try:
        await asyncio.to_thread(proxy.listen)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.to_thread(proxy.tell, f"delay {DELAY_S}")
        assert await round_trip_s(reader, writer) >= 2 * DELAY_S
        writer.close()
    finally:
        proxy.kill()
    with pytest.raises(ServiceFailedError):
        proxy.tell("pass")
