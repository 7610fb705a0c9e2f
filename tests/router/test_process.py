"""The router as a process: ports, health, signals, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub


class RouterProcess:
    """`python -P -m ryzanstein.router` on free ports, read from its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.ports: dict[str, int] = {}

    async def event(self, *names: str) -> dict[str, Any]:
        """The next log line of one of these events."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while line := await self.process.stderr.readline():
                with contextlib.suppress(json.JSONDecodeError):
                    entry: dict[str, Any] = json.loads(line)
                    if entry["event"] in names:
                        return entry
        raise AssertionError(f"the router ended without any of {names}")


@contextlib.asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[RouterProcess]:
    command = (sys.executable, "-m", "ryzanstein.router", *flags)
    # What nobody reads is kept up to twice the limit; beyond it the router would wait for its log to be read.
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, limit=2**24)
    try:
        yield RouterProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def get(url: str) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.read().decode()

    return await asyncio.to_thread(fetch)


async def test_a_router_process_serves_both_faces_and_drains_on_sigterm(start_node: Any, tmp_path: Path) -> None:
    node = await start_node("a", step_s=0.02)
    ports = ("--grpc-port", "0", "--http-port", "0")
    async with router_process(*ports, "--nodes", node.address, "--state-dir", str(tmp_path), "--router-id", "r") as router:
        serving = await router.event("serving")
        await router.event("readiness")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving['grpc_port']}") as channel:
            serving_now = health_pb2.HealthCheckResponse.SERVING
            assert [await health(channel, name) for name in ("", "startup", "readiness")] == [serving_now] * 3
            request = inference.StreamChatRequest(
                chat=inference.ChatRequest(
                    messages=[inference.Message(role=inference.ROLE_USER, content="hi")],
                    sampling=inference.SamplingParams(max_tokens=50),
                )
            )
            stream = aiter(InferenceServiceStub(channel).StreamChat(request))
            await anext(stream)
            assert json.loads(await get(f"http://127.0.0.1:{serving['http_port']}/v1/models"))["data"][0]["id"] == "demo"
            assert "ryzanstein_router_link_up" in await get(f"http://127.0.0.1:{serving['metrics_port']}/metrics")
            router.process.send_signal(signal.SIGTERM)
            events = [response.event async for response in stream]
            assert events[-1].finished.usage.completion_tokens == 50
        assert await asyncio.wait_for(router.process.wait(), 20) == 0


async def test_without_a_node_it_lives_and_is_not_ready(tmp_path: Path) -> None:
    async with router_process("--grpc-port", "0", "--no-http", "--state-dir", str(tmp_path)) as router:
        serving = await router.event("serving")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving['grpc_port']}") as channel:
            assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING
            assert await health(channel, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
        router.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(router.process.wait(), 20) == 0


@pytest.mark.parametrize(
    ("flags", "code"),
    [(("--grpc-port", "none"), 2), (("--session-store", "paper"), 2), (("--grpc-port", "0", "--state-dir", "/dev/null"), 1)],
)
async def test_what_cannot_be_started_ends_with_a_code_that_says_so(flags: tuple[str, ...], code: int) -> None:
    async with router_process(*flags) as router:
        assert await asyncio.wait_for(router.process.wait(), 30) == code


@pytest.mark.parametrize(
    ("url", "code", "printed_part"),
    [
        ("redis://:hunter2@127.0.0.1:{port}/0", 1, "Redis refuses this router"),
        ("http://:hunter2@127.0.0.1:{port}/0", 2, "must be redis://"),
        ("redis://:hunter2@127.0.0.1:999999/0", 2, "must name a port"),
    ],
)
@pytest.mark.long
async def test_a_redis_url_that_cannot_be_used_is_reported_without_its_password(
    start_redis: Any, tmp_path: Path, url: str, code: int, printed_part: str
) -> None:
    redis = await start_redis(password="another")
    environment = {**os.environ, "RYZANSTEIN_REDIS_URL": url.format(port=redis.port)}
    command = (sys.executable, "-m", "ryzanstein.router", "--session-store", "redis", "--grpc-port", "0", "--no-http")
    process = await asyncio.create_subprocess_exec(
        *command, "--state-dir", str(tmp_path), "--log-level", "debug", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, printed = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == code
    assert printed_part in printed.decode()
    assert "hunter2" not in printed.decode()


async def test_a_taken_port_is_reported(start_node: Any, tmp_path: Path) -> None:
    node = await start_node("a")
    async with router_process("--grpc-port", str(node.port), "--no-http", "--state-dir", str(tmp_path)) as router:
        assert str(node.port) in (await router.event("cannot serve"))["error"]
        assert await asyncio.wait_for(router.process.wait(), 20) == 1


async def test_a_router_that_was_paused_suspects_nobody(start_node: Any, until: Any, tmp_path: Path) -> None:
    nodes = [await start_node(name, step_s=0.01) for name in "ab"]
    addresses = ",".join(node.address for node in nodes)
    async with router_process("--grpc-port", "0", "--no-http", "--nodes", addresses, "--state-dir", str(tmp_path)) as router:
        serving = await router.event("serving")
        await router.event("readiness")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving['grpc_port']}") as channel:
            chat = inference.ChatRequest(
                messages=[inference.Message(role=inference.ROLE_USER, content="hi")],
                sampling=inference.SamplingParams(max_tokens=300),
            )
            answer = InferenceServiceStub(channel).Chat(chat)
            await until(lambda: sum(node.num_running for node in nodes) == 1)
            for pause_s in (0.3, 0.7, 1.2):
                await asyncio.sleep(0.2)
                router.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(pause_s)
                router.process.send_signal(signal.SIGCONT)
            assert (await answer).usage.completion_tokens == 300
        printed = await get(f"http://127.0.0.1:{serving['metrics_port']}/metrics")
        assert 'outcome="started"' not in printed
        assert sum(len(node.submits) for node in nodes) == 1


async def test_three_router_processes_send_a_session_to_one_node(start_node: Any, tmp_path: Path) -> None:
    """They have their own memories of sessions, and nothing else that could tell them."""
    nodes = ",".join([(await start_node(name)).address for name in "abc"])
    seen: dict[str, set[str]] = {f"s{i}": set() for i in range(8)}
    for name in "xyz":
        flags = ("--grpc-port", "0", "--no-http", "--nodes", nodes, "--state-dir", str(tmp_path / name))
        async with router_process(*flags) as router:
            port = await _port_when_linked(router, 3)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for session_id, found in seen.items():
                    found.add(await _answering_node(channel, session_id))
    assert all(len(found) == 1 for found in seen.values())
    assert len(set.union(*seen.values())) == 3


async def _port_when_linked(router: RouterProcess, links: int) -> int:
    """Links may be up before the router serves, or after."""
    port = 0
    while links or not port:
        entry = await router.event("link up", "serving")
        links -= entry["event"] == "link up"
        port = entry.get("grpc_port", port)
    return port


async def _answering_node(channel: grpc.aio.Channel, session_id: str) -> str:
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hi")],
        sampling=inference.SamplingParams(max_tokens=1),
        session_id=session_id,
    )
    responses = InferenceServiceStub(channel).StreamChat(inference.StreamChatRequest(chat=chat))
    events = [response.event async for response in responses]
    return str(events[0].started.node_id)
