"""A server of the agent that sleeps while its model does: the process stays, and is woken instead of started."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.worker.engines.recorded import DONE, vllm_event, vllm_usage
from tests.worker.engines.test_remote_group import QUICK

from ryzanstein.worker.engines.child.command import can_sleep, vllm_environment
from ryzanstein.worker.engines.child.group import ChildEngines, ChildSpec
from ryzanstein.worker.engines.remote.finding import RemoteSpec
from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.settings.rank_settings import QueueSettings
from ryzanstein.worker.supervision.group import EngineModel, GroupEvents, RanksLost

SERVER = """
import json, sys
from aiohttp import web

calls, can_sleep, can_wake, events = sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1", json.loads(sys.argv[5])
models = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}]}

def answers(value, status=200):
    async def answer(request):
        with open(calls, "a") as file:
            file.write(request.path_qs + "\\n")
        return web.json_response(value, status=status)
    return answer

async def complete(request):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event}\\n\\n".encode())
    return response

app = web.Application()
app.router.add_get("/v1/models", answers(models))
app.router.add_get("/version", answers({"version": "0.33.0"}))
app.router.add_get("/health", answers({}))
app.router.add_post("/v1/completions", complete)
if can_sleep:
    app.router.add_post("/sleep", answers({"status": "sleeping"}))
    app.router.add_post("/wake_up", answers({"status": "awake"}, 200 if can_wake else 500))
web.run_app(app, path=sys.argv[1], print=None)
"""


class Children:
    """The engines of a model, and what their server was asked."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        self.can_sleep = self.can_wake = True
        self.starts = 0
        spec = ChildSpec(self._command, lambda _: dict(os.environ), self._remote, sleeps=True)
        self.engines = ChildEngines(
            spec, EngineModel("/models/m", 2048, 1000), GroupEvents(lambda _: None, lambda _: None, lambda: False)
        )

    def _command(self, model: EngineModel, folder: Path) -> list[str]:
        self.starts += 1
        events = [
            each if isinstance(each, str) else json.dumps(each) for each in (vllm_event([11], 1, "length"), vllm_usage(1))
        ]
        end = DONE if isinstance(DONE, str) else DONE.decode()
        can = [str(int(each)) for each in (self.can_sleep, self.can_wake)]
        return [sys.executable, "-c", SERVER, str(folder / "socket"), str(self.calls), *can, json.dumps([*events, end])]

    def _remote(self, folder: Path) -> RemoteSpec:
        address = f"unix://{folder / 'socket'}"
        bounds = replace(QUICK, start_s=20.0)
        return RemoteSpec(
            address,
            lambda: EngineClient(EngineAddress.parse(address), connect_s=1.0),
            "auto",
            "off",
            4,
            512,
            QueueSettings(),
            bounds,
        )

    def asked(self) -> list[str]:
        """What concerned its sleep."""
        return [line for line in self.calls.read_text().splitlines() if "sleep" in line or "wake" in line]


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    children = Children(tmp_path)
    yield children
    await children.engines.close()


async def test_a_server_sleeps_and_is_woken(children: Children) -> None:
    engines, pids = children.engines, []
    for _ in range(3):
        group = engines.make()
        await group.start()
        pids.append({each.pid for each in group._server.processes()})
        await group.end(graceful=True)
        await engines.close(sleeps=True)
    assert children.asked() == ["/sleep?level=1", "/wake_up"] * 2 + ["/sleep?level=1"]
    assert (children.starts, pids[0]) == (1, pids[2])
    folder = group._server.folder
    await engines.close()
    assert not group._server.runs
    assert not folder.exists()


async def test_a_server_that_cannot_sleep_is_ended(children: Children) -> None:
    children.can_sleep = False
    group = children.engines.make()
    await group.start()
    await group.end(graceful=True)
    await children.engines.close(sleeps=True)
    assert not group._server.runs


async def test_a_server_that_dies_in_its_sleep_is_started_anew(children: Children) -> None:
    group = children.engines.make()
    await group.start()
    await group.end(graceful=True)
    await children.engines.close(sleeps=True)
    server, process = group._server, group._server._process
    assert process is not None
    os.kill(server.processes()[0].pid, signal.SIGKILL)
    await process.wait()
    group = children.engines.make()
    assert not server.folder.exists()
    await group.start()
    assert children.starts == 2
    await group.end(graceful=False)


async def test_a_server_that_does_not_wake_is_replaced(children: Children) -> None:
    children.can_wake = False
    group = children.engines.make()
    await group.start()
    await group.end(graceful=True)
    await children.engines.close(sleeps=True)
    group = children.engines.make()
    with pytest.raises(RanksLost, match=r"the engine does not wake: .* 500"):
        await group.start()
    await group.end(graceful=False)
    assert not group._server.runs
    group = children.engines.make()
    await group.start()
    assert children.starts == 2
    await group.end(graceful=False)


def test_vllm_opens_its_paths_for_sleep_only_where_it_can(tmp_path: Path) -> None:
    assert can_sleep(["--dtype", "half", "--enable_sleep_mode"])
    assert not can_sleep(["--dtype", "half"])
    assert "VLLM_SERVER_DEV_MODE" not in vllm_environment(tmp_path)
    assert vllm_environment(tmp_path, sleeps=True)["VLLM_SERVER_DEV_MODE"] == "1"
