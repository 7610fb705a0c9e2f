from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from fastapi import FastAPI

from ryzanstein.router.faces.http.serving.server import HttpServer


@pytest.fixture
def app():
    made = FastAPI()
    made.state.release = asyncio.Event()

    @made.get("/slow")
    async def slow():
        await made.state.release.wait()
        return "done"

    return made


async def test_a_taken_port_is_an_os_error_that_names_it(app):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await HttpServer(app, "127.0.0.1", port).start()


async def test_running_requests_end_before_the_server_and_new_connections_are_refused(app):
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    url = f"http://127.0.0.1:{server.port}/slow"
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http, httpx.AsyncClient(trust_env=False) as late:
        running = asyncio.create_task(http.get(url))
        await asyncio.sleep(0.2)
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0.4)
        with pytest.raises(httpx.ConnectError):
            await late.get(url)
        app.state.release.set()
        assert (await running).json() == "done"
        await asyncio.wait_for(stopping, 10)


async def test_what_runs_longer_than_the_grace_is_cut_off(app):
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
        running = asyncio.create_task(http.get(f"http://127.0.0.1:{server.port}/slow"))
        await asyncio.sleep(0.2)
        await asyncio.wait_for(server.stop(1), 10)
        failure = (await asyncio.gather(running, return_exceptions=True))[0]
        assert isinstance(failure, httpx.TransportError) or failure.status_code == 500


async def test_a_server_that_ends_by_itself_says_so_and_can_still_be_stopped(app, monkeypatch):
    async def breaks(*_: object) -> None:
        raise ValueError("nobody has thought of this")

    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    monkeypatch.setattr(server._server, "on_tick", breaks)
    with pytest.raises(ValueError, match="nobody has thought"):
        await asyncio.wait_for(server.live(), 10)
    await asyncio.wait_for(server.stop(1), 10)


async def test_a_server_that_is_stopped_has_not_ended_by_itself(app):
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    living = asyncio.create_task(server.live())
    await asyncio.sleep(0)
    assert not living.done()
    await server.stop(1)
    await asyncio.wait_for(living, 10)


async def test_stopping_what_never_started_is_nothing(app):
    server = HttpServer(app, "127.0.0.1", 0)
    await asyncio.wait_for(server.stop(1), 10)
    assert server.port == 0, "it was never bound"
    await asyncio.wait_for(server.live(), 10)
