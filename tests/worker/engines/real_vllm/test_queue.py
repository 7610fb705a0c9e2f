"""The queue before a real vLLM: tenants, deadlines and refusals are those of our own engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from ryzanstein.errors import Code
from ryzanstein.generation.prompts import TokenPrompt

PLACES = ("--max-sequences", "2", "--max-waiting", "16", "--model-name", "demo")
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


def of(attempt: Any, **fields: Any) -> Any:
    """The attempt with other fields of its request: tenant, priority, deadline."""
    return replace(attempt, request=replace(attempt.request, **fields))


@pytest.fixture(scope="module")
def nodes(vllm: Any, model: Any, node_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A node beside vLLM, and one with ranks of its own, each with two places."""
    folder = tmp_path_factory.mktemp("nodes")
    beside = node_process(folder / "vllm.log", "--engine", vllm.url, *PLACES, model=model)
    own = node_process(folder / "own.log", *PLACES, model=model, tp=1)
    try:
        for node in (beside, own):
            node.wait_event("ranks ready")
        yield {"vllm": beside, "own": own}
    finally:
        beside.close()
        own.close()


@pytest.fixture
def asked(attempt: Any) -> Any:
    """An attempt with a prompt of its own, and fields of its request."""

    def make(number: int, *, fields: dict[str, Any] | None = None, **sampling: Any) -> Any:
        return of(attempt(prompt=TokenPrompt((300, 7, number + 1)), **{**LONG, **sampling}), **(fields or {}))

    return make


@pytest.mark.parametrize("engine", ["vllm", "own"])
async def test_tenants_that_wait_are_served_alike(nodes: Any, connect: Any, asked: Any, engine: str) -> None:
    """One tenant asks for four times as much, and first. While both wait, both get as many tokens."""
    async with connect(nodes[engine].address) as link:
        await link.run(asked(1, max_tokens=20), 60)
        many = [await link.submit(asked(i, fields={"tenant": "many"}, max_tokens=60)) for i in range(12)]
        few = [await link.submit(asked(100 + i, fields={"tenant": "few"}, max_tokens=60)) for i in range(3)]
        served, take = [], link._take

        def counted(output: Any) -> None:
            take(output)
            if not served and all(link.streams[handle].finished for handle in few):
                served.append(sum(len(link.streams[handle].tokens()) for handle in many))

        link._take = counted
        for handle in [*few, *many]:
            await link.wait(handle, lambda stream: stream.finished, 120)
        assert served[0] <= 180 + 3 * 60, "as much as the other, what ran before it came, and what ran beside its last one"


@pytest.mark.parametrize("engine", ["vllm", "own"])
async def test_a_full_line_refuses_and_says_when_to_come_back(nodes: Any, connect: Any, asked: Any, engine: str) -> None:
    async with connect(nodes[engine].address) as link:
        await link.run(asked(1, max_tokens=20), 60)
        handles = [await link.submit(asked(i, fields={"tenant": "heavy"})) for i in range(30)]
        await link.until(lambda: any(link.streams[handle].failed for handle in handles))
        assert not [(i, link.streams[handle].failed) for i, handle in enumerate(handles[:16]) if link.streams[handle].failed]
        failed = next(failed for handle in handles if (failed := link.streams[handle].failed))
        assert (failed.code, failed.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert 0 < failed.retry_delay.ToNanoseconds() <= 60e9
        assert not failed.node_fault
        light = await link.run(asked(7, fields={"tenant": "light"}, max_tokens=5), 60)
        assert len(light.tokens()) == 5
        waiting = [handle for handle in handles if not (link.streams[handle].finished or link.streams[handle].failed)]
        assert waiting, "it did not wait behind them"
        await asyncio.gather(*(link.cancel(handle) for handle in waiting))


@pytest.mark.parametrize("engine", ["vllm", "own"])
async def test_a_deadline_ends_what_waits_and_what_runs(nodes: Any, connect: Any, asked: Any, engine: str) -> None:
    async with connect(nodes[engine].address) as link:
        await link.run(asked(1, max_tokens=5), 60)
        ends = time.time() + 0.3
        handles = [await link.submit(asked(i, fields={"deadline": ends})) for i in range(5)]
        for handle in handles:
            stream = await link.wait(handle, lambda stream: stream.failed or stream.finished, 60)
            assert stream.failed.code in (Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED)
        assert any(link.streams[handle].failed.code == Code.DEADLINE_EXCEEDED for handle in handles)
        assert len((await link.run(asked(3, max_tokens=5), 60)).tokens()) == 5
