"""Routers as processes, which can be killed and stopped, over scripted nodes of the test's own."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub, SessionServiceStub

START_S = 30.0


class Reading:
    """What a client has seen of one generation, over all its connections. Asserts that no token is lost or repeated."""

    def __init__(self) -> None:
        self.generation_id = ""
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.reasons: dict[int, int] = {}
        self.usage = inference.Usage()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def from_index(self) -> dict[int, int]:
        return {choice: len(tokens) for choice, tokens in self.tokens.items()}

    async def read(self, stream: Any, until_tokens: int | None = None) -> Reading:
        """To the stream's end, or until so many tokens (0: its start) have been seen; the stream stays open then."""
        while until_tokens is None or not self.generation_id or self.num_tokens < until_tokens:
            response = await stream.read()
            if response is grpc.aio.EOF:
                break
            self.take(response.event)
        return self

    def take(self, event: inference.GenerationEvent) -> None:
        if event.HasField("started"):
            assert self.generation_id in ("", event.started.generation_id)
            self.generation_id = event.started.generation_id
        elif event.HasField("delta"):
            delta = event.delta
            tokens = self.tokens.setdefault(delta.choice, [])
            assert delta.first_index == len(tokens), f"choice {delta.choice}: {delta.first_index} after {len(tokens)} tokens"
            tokens += delta.token_ids
            self.texts[delta.choice] = self.texts.get(delta.choice, "") + delta.text
            self.logprobs.setdefault(delta.choice, []).extend(entry.logprob for entry in delta.logprobs)
        else:
            # Ends are said again to a reader that comes back.
            assert self.reasons.setdefault(event.finished.choice, event.finished.finish_reason) == event.finished.finish_reason
            self.usage = event.finished.usage


class EndedError(Exception):
    """A router did not start; the message is the end of its log."""


@dataclass(eq=False)
class RouterProcess:
    """`python -P -m ryzanstein.router` on ports that stay the same over restarts."""

    flags: dict[str, str]
    log_path: Path
    command: tuple[str, ...] = ("-m", "ryzanstein.router")
    process: asyncio.subprocess.Process | None = None
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.flags['grpc-port']}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.flags['http-port']}"

    async def start(self) -> None:
        words = [word for name, value in self.flags.items() for word in (f"--{name}", value)]
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *self.command, *words, stdout=log, stderr=log, start_new_session=True
            )
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self._is_ready):
                if self.process.returncode is not None:
                    raise EndedError(self.log_path.read_text()[-4000:])
                await asyncio.sleep(0.05)

    async def start_on_free_ports(self, attempts: int = 3) -> None:
        """For the first start: a port that somebody took before it was bound is chosen again."""
        for left in reversed(range(attempts)):
            self.flags |= zip(("grpc-port", "http-port", "metrics-port"), map(str, free_ports(3)), strict=True)
            try:
                await self.start()
                return
            except EndedError as error:
                if not left or ("in use" not in str(error) and "cannot listen" not in str(error)):
                    raise

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/readyz", timeout=2):
                return True
        except (OSError, http.client.HTTPException):
            return False

    @property
    def inference(self) -> Any:
        """A stub on a connection of its own."""
        self.channels.append(grpc.aio.insecure_channel(self.address, (("grpc.use_local_subchannel_pool", 1),)))
        return InferenceServiceStub(self.channels[-1])

    @property
    def sessions(self) -> Any:
        self.channels.append(grpc.aio.insecure_channel(self.address, (("grpc.use_local_subchannel_pool", 1),)))
        return SessionServiceStub(self.channels[-1])

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ended()

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), 30)

    async def value(self, name: str, **labels: str) -> float:
        """A metric's value; 0 when it has none yet."""
        url = f"http://127.0.0.1:{self.flags['metrics-port']}/metrics"

        def get() -> str:
            with urllib.request.urlopen(url, timeout=5) as page:
                return str(page.read().decode())

        families = text_string_to_metric_families(await asyncio.to_thread(get))
        samples = [sample for family in families for sample in family.samples]
        found = [s.value for s in samples if s.name == f"ryzanstein_router_{name}" and labels.items() <= s.labels.items()]
        return sum(found)

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log's lines that say so."""
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        if self.process is not None and self.process.returncode is None:
            self.send(signal.SIGKILL)
            await self.process.wait()


@pytest.fixture
async def start_routers(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[list[RouterProcess]]]]:
    """Starts routers of one journal: SQLite's unless other flags say so."""
    routers: list[RouterProcess] = []

    async def start(count: int, *nodes: Any, **flags: Any) -> list[RouterProcess]:
        for _ in range(count):
            name = f"router-{len(routers)}"
            described = {
                "router-id": name,
                "state-dir": str(tmp_path / name),
                "session-dir": str(tmp_path),
                "nodes": ",".join(node.address for node in nodes),
                **{key.replace("_", "-"): json.dumps(value) if key == "tuning" else str(value) for key, value in flags.items()},
            }
            routers.append(RouterProcess(described, tmp_path / f"{name}.log"))
        await asyncio.gather(*(router.start_on_free_ports() for router in routers[-count:]))
        return routers[-count:]

    yield start
    for router in routers:
        await router.close()


class Client:
    """One client: asks at a router, and comes back at another one."""

    def __init__(self) -> None:
        self.seen = Reading()

    async def ask(self, router: RouterProcess, tokens: int, until_tokens: int | None = None, **asked: Any) -> Any:
        """Reads the stream to its end, or until so many tokens were seen. Returns the stream."""
        session_id = asked.pop("session_id", "")
        chat = inference.ChatRequest(
            messages=[inference.Message(role="ROLE_USER", content="hello")],
            sampling=inference.SamplingParams(max_tokens=tokens, **asked),
            session_id=session_id,
        )
        stream = router.inference.StreamChat(inference.StreamChatRequest(chat=chat), timeout=60)
        await self.seen.read(stream, until_tokens)
        return stream

    async def come_back(self, router: RouterProcess, until_tokens: int | None = None) -> Any:
        """The rest, from where the client is."""
        request = inference.AttachGenerationRequest(generation_id=self.seen.generation_id, from_index=self.seen.from_index)
        stream = router.inference.AttachGeneration(request, timeout=60)
        await self.seen.read(stream, until_tokens)
        return stream


@pytest.fixture
def new_client() -> type[Client]:
    return Client
