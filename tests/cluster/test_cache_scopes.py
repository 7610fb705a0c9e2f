"""What the prefix caches of real nodes tell one tenant of another: nothing, wherever the pages are.

What the usage of an answer says must be what the nodes have computed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import Delta, Finished, Started
from ryzanstein.router.assembly import assembled
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.core.core import Core

pytestmark = [pytest.mark.cluster, pytest.mark.long]

LONG = " ".join(f"Item {i} is number {7 * i}." for i in range(60))
MOST = 64  # tokens of a long prompt that are computed although it is cached
TIERS = ("--kv-host-bytes", str(2**27), "--kv-disk-bytes", str(2**28))


@dataclass
class Nodes:
    """Two nodes of a cluster with both tiers. Its own router takes no part."""

    cluster: LocalCluster

    def address(self, node_id: str) -> str:
        return self.cluster.services[node_id].grpc_address

    def counted(self, name: str, **labels: str) -> float:
        """A metric of all nodes that live."""
        return sum(self._counted(node_id, name, labels) for node_id in self.cluster.node_ids)

    def _counted(self, node_id: str, name: str, labels: dict[str, str]) -> float:
        inside = ",".join(f'{key}="{value}"' for key, value in sorted({**labels, "model": "demo"}.items()))
        wanted = f"ryzanstein_worker_{name}{{{inside}}} "
        try:
            with urllib.request.urlopen(self.cluster.services[node_id].metrics_url, timeout=10) as response:
                lines = response.read().decode().splitlines()
        except OSError:
            return 0.0
        return next((float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted)), 0.0)


@dataclass
class Asked:
    node_ids: list[str]
    cached: int
    computed: int


@dataclass
class Asker:
    """A router's core on some nodes, which asks in the name of cache scopes."""

    core: Core
    nodes: Nodes

    async def __call__(
        self, scope: str, text: str = LONG, session_id: str = "", on_delta: Callable[[Delta], None] | None = None, **more: Any
    ) -> Asked:
        prompt = ChatPrompt((Message(Role.USER, text),))
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, **{"max_tokens": 2, **more})
        request = GenerationRequest("", prompt, sampling, session_id, tenant=scope, cache_scope=scope)
        before = await asyncio.to_thread(self.nodes.counted, "tokens_total", kind="prefill")
        asked, started = Asked([], -1, 0), None
        async for event in self.core.follow(await self.core.submit(request)):
            match event:
                case Started():
                    started = event
                case Delta():
                    asked.node_ids += [] if event.node_id in asked.node_ids else [event.node_id]
                    if on_delta is not None:
                        on_delta(event)
                case Finished():
                    asked.cached = event.usage.cached_prompt_tokens
        assert started is not None
        asked.computed = started.prompt_tokens - asked.cached
        # Of a cached prompt the last token alone may be computed: it counts as one of the answer.
        least = before + asked.computed - 1
        await wait(lambda: self.nodes.counted("tokens_total", kind="prefill") >= least)
        return asked

    async def assert_computed(self, scope: str, **more: Any) -> None:
        """Asserts that a prompt was computed as if nobody had ever asked it."""
        asked = await self(scope, **more)
        assert asked.cached == 0, scope
        assert asked.computed > 500, scope

    async def assert_cached(self, scope: str, **more: Any) -> Asked:
        asked = await self(scope, **more)
        assert asked.cached > 500, scope
        assert asked.computed < MOST, scope
        return asked


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    flags = (*TIERS, "--kv-disk-dir", str(tmp_path_factory.mktemp("pages")), "--num-blocks", "160")
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, worker_flags=flags)) as cluster:
        yield Nodes(cluster)


@pytest.fixture
async def asker(nodes: Nodes, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts routers on the nodes of these ids."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*node_ids: str) -> Asker:
            addresses = ",".join(map(nodes.address, node_ids))
            settings = RouterSettings(grpc_port=0, state_dir=tmp_path, session_store="memory", nodes=addresses)
            router = await stack.enter_async_context(assembled(settings))
            async with asyncio.timeout(60):
                while sum(model.ready_nodes for model in router.core.models()) < len(node_ids):  # noqa: ASYNC110 - no event says so
                    await asyncio.sleep(0.05)
            return Asker(router.core, nodes)

        yield start


async def wait(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - metrics of another process
            await asyncio.sleep(0.05)


async def test_a_prompt_is_cached_for_its_scope_alone(asker: Any) -> None:
    ask = await asker("node-0")
    scopes = ("a", "b", "", "group:x")
    for scope in scopes:
        await ask.assert_computed(scope)
    for scope in reversed(scopes):
        await ask.assert_cached(scope)


async def test_pages_of_memory_and_disk_come_back_to_their_scope_alone(asker: Any, nodes: Nodes) -> None:
    ask = await asker("node-0")
    text = {"text": f"From tiers. {LONG}"}
    await ask.assert_computed("a", session_id="a", **text)
    await wait(lambda: nodes.counted("page_tier_bytes", tier="disk") > 0 and nodes.counted("pages_queued") == 0)

    async def evict() -> None:
        for number in range(5):
            await ask(f"filler-{number}", text=f"{number} {LONG}")

    for source in ("host", "disk"):
        if source == "disk":
            nodes.cluster.restart("node-0")
            ask = await asker("node-0")
        else:
            await evict()
        restored = nodes.counted("pages_restored_total", source=source)
        await ask.assert_computed(f"b-{source}", session_id=f"b-{source}", **text)
        assert nodes.counted("pages_restored_total", source=source) == restored
        await ask.assert_cached("a", session_id=f"a-{source}", **text)
        assert nodes.counted("pages_restored_total", source=source) > restored


async def test_pages_that_another_node_sent_are_those_of_their_scope(asker: Any, nodes: Nodes) -> None:
    ask, text = await asker("node-0", "node-1"), f"From another node. {LONG}"
    killed: list[str] = []

    def kill_late(delta: Delta) -> None:
        if delta.first_index >= 100 and not killed:
            killed.append(delta.node_id)
            nodes.cluster.kill(delta.node_id, signal.SIGKILL)

    asked = await ask("a", text=text, session_id="moved", on_delta=kill_late, max_tokens=200)
    assert asked.node_ids[0] == killed[0]
    assert len(asked.node_ids) == 2
    await ask.assert_computed("b", text=text, session_id="b-moved")
    await ask.assert_computed("", text=text, session_id="nobody-moved")
    found = await ask.assert_cached("a", text=text, session_id="a-moved")
    assert found.node_ids == asked.node_ids[1:]
    nodes.cluster.restart(killed[0])
