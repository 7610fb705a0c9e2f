"""A router of two processes: one address for clients, who are served wherever they come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from ryzanstein.router.config import RouterSettings
from ryzanstein.router.processes.shares import of_process
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import router_pb2 as operators
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub
from ryzanstein.v1.router_pb2_grpc import RouterServiceStub

Events = list[inference.GenerationEvent]


class TwoProcesses:
    """`ryzanstein.router --processes 2` on free ports."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.serving: list[dict[str, Any]] = []
        self.pids: dict[int, int] = {}
        self._stack = contextlib.AsyncExitStack()

    async def read(self, until: int) -> None:
        """Reads the log until so many processes have begun to serve."""
        assert self.process.stderr is not None
        async with asyncio.timeout(40):
            while len(self.serving) < until and (line := await self.process.stderr.readline()):
                entry: dict[str, Any] = json.loads(line)
                if entry["event"] == "process started":
                    self.pids[entry["number"]] = entry["pid"]
                elif entry["event"] == "serving":
                    self.serving.append(entry)
        assert len(self.serving) == until

    async def channel(self, number: int) -> grpc.aio.Channel:
        """Returns a channel to the process of this number: to which one a connection goes is the kernel's choice."""
        async with asyncio.timeout(30):
            while True:
                options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
                channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.serving[0]['grpc_port']}", options)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    status = await RouterServiceStub(channel).GetRouterStatus(operators.GetRouterStatusRequest())
                    if status.router_id == f"r-{number}":
                        self._stack.push_async_callback(channel.close)
                        return channel
                await channel.close()

    async def close(self) -> None:
        await self._stack.aclose()
        if self.process.returncode is None:
            self.process.kill()  # the kernel ends the others
        await self.process.communicate()


@contextlib.asynccontextmanager
async def two_processes(*flags: str) -> AsyncIterator[TwoProcesses]:
    command = (sys.executable, "-P", "-m", "ryzanstein.router", "--processes", "2", "--router-id", "r", *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, limit=2**24)
    router = TwoProcesses(process)
    try:
        await router.read(2)
        yield router
    finally:
        await router.close()


def asked() -> inference.StreamChatRequest:
    messages = [inference.Message(role=inference.ROLE_USER, content="hi")]
    sampling = inference.SamplingParams(max_tokens=40, seed=1)
    return inference.StreamChatRequest(chat=inference.ChatRequest(messages=messages, sampling=sampling))


async def events(call: Any, until: int | None = None) -> Events:
    """Reads a stream, to its end or until the token of this index."""
    seen: Events = []
    async for message in call:
        seen.append(message.event)
        if until is not None and message.event.delta.first_index >= until:
            break
    return seen


def token_ids(seen: Events) -> list[int]:
    return [token for event in seen for token in event.delta.token_ids]


@pytest.mark.long
async def test_a_client_comes_back_at_the_other_process_also_when_its_own_was_killed(start_node: Any, tmp_path: Path) -> None:
    node = await start_node("a", step_s=0.05)
    ports = ("--grpc-port", "0", "--http-port", "0")
    async with two_processes(*ports, "--nodes", node.address, "--state-dir", str(tmp_path)) as router:
        first, second = router.serving
        assert {each["process"] for each in (first, second)} == {"0", "1"}
        assert (first["grpc_port"], first["http_port"]) == (second["grpc_port"], second["http_port"])
        assert len({each[port] for each in (first, second) for port in ("metrics_port", "peer_port")}) == 4
        zero, one = [InferenceServiceStub(await router.channel(number)) for number in (0, 1)]
        whole = token_ids(await events(one.StreamChat(asked())))
        assert len(whole) == 40

        begun = await events(zero.StreamChat(asked()), until=3)
        again = inference.AttachGenerationRequest(generation_id=begun[0].started.generation_id, from_index={0: 4})
        assert token_ids(await events(one.AttachGeneration(again))) == whole[4:], "relayed by the other process"

        begun = await events(zero.StreamChat(asked()), until=3)
        os.kill(router.pids[0], signal.SIGKILL)
        again = inference.AttachGenerationRequest(generation_id=begun[0].started.generation_id, from_index={0: 4})
        assert token_ids(await events(one.AttachGeneration(again))) == whole[4:], "taken over by the other process"

        await router.read(3)
        assert token_ids(await events(InferenceServiceStub(await router.channel(0)).StreamChat(asked()))) == whole
        url = f"http://127.0.0.1:{first['http_port']}"
        with pytest.raises(urllib.request.HTTPError, match="404"):  # they would be those of either one
            await asyncio.to_thread(urllib.request.urlopen, f"{url}/metrics")
        router.process.terminate()
        assert await asyncio.wait_for(router.process.wait(), 40) == 0


async def test_a_port_that_another_program_has_is_an_error_at_once(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = ("--processes", "2", "--no-http", "--grpc-port", str(port), "--state-dir", str(tmp_path))
        command = (sys.executable, "-P", "-m", "ryzanstein.router", *flags)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said.decode()


def test_a_process_has_its_part_of_the_limits_and_ports_of_its_own(tmp_path: Path) -> None:
    ports = {"metrics_port": 9000, "health_port": 9100}
    settings = RouterSettings(processes=3, max_running=10, state_dir=tmp_path, router_id="r", **ports)
    parts = [of_process(settings, number) for number in range(3)]
    assert [each.max_running for each in parts] == [4, 4, 4]
    assert [(each.metrics_port, each.health_port, each.peer_port) for each in parts] == [
        (9000, 9100, 0),
        (9001, 9101, 0),
        (9002, 9102, 0),
    ]
    assert len({each.router_id for each in parts}) == len({each.state_dir for each in parts}) == 3
    assert {each.session_dir for each in parts} == {tmp_path}
    reached = settings.model_copy(update={"router_address": "10.0.0.5:7000", "peer_port": 7000})
    assert [of_process(reached, number).router_address for number in (0, 2)] == ["10.0.0.5:7000", "10.0.0.5:7002"]
    for same in ("10.0.0.5", f"10.0.0.5:{settings.grpc_port}", ""):
        assert of_process(settings.model_copy(update={"router_address": same}), 2).router_address == same
    assert {each.grpc_port for each in parts} == {settings.grpc_port}


@pytest.mark.parametrize(
    "wrong",
    [{"session_store": "memory"}, {"log_file_bytes": 4096}, {"processes": 65}, {"metrics_port": 9090, "health_port": 9091}],
)
def test_what_processes_cannot_share_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="processes"):
        RouterSettings(**{"processes": 2, "state_dir": tmp_path, **wrong})
