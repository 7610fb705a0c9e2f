"""A real node that is asked for more than it can do at once: who runs first, who is refused, what is counted."""

import asyncio
import urllib.request
from dataclasses import replace

import pytest

from ryzanstein.errors import Code
from ryzanstein.worker.config import WorkerSettings

pytestmark = [pytest.mark.cluster, pytest.mark.long]

WILD = {"temperature": 1.5, "seed": 11, "ignore_eos": True}


def of(attempt, **fields):
    """The attempt with other fields of its request: tenant, priority, deadline."""
    return replace(attempt, request=replace(attempt.request, **fields))


@pytest.fixture
def page():
    """A node's metrics by name and labels."""

    async def read(node) -> str:
        def get() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=5) as response:
                return response.read().decode()

        return await asyncio.to_thread(get)

    return read


@pytest.fixture
def small(start_node):
    """A node with two places in its batch."""
    node = start_node("--max-sequences", "2", "--max-waiting", "16", tp=1)
    node.wait_event("ranks ready")
    return node


async def test_a_paused_answer_goes_on_exactly_where_it_was(small, connect, attempt, page, eventually):
    long = {**WILD, "max_tokens": 300}
    async with connect(small.address) as link:
        undisturbed = [await link.run(attempt(f"Tell me about {i}.", **long)) for i in range(2)]
        handles = [await link.submit(attempt(f"Tell me about {i}.", **long)) for i in range(2)]
        for _ in range(3):
            for handle in handles:
                known = len(link.streams[handle].tokens())
                await link.wait(handle, lambda s, known=known: len(s.tokens()) > known or s.finished)
            urgent = await link.run(of(attempt("Now!", max_tokens=4, ignore_eos=True), priority=5))
            assert len(urgent.tokens()) == 4
        for handle, expected in zip(handles, undisturbed, strict=True):
            await link.wait(handle, lambda s: s.finished)
            stream = link.streams[handle]
            assert stream.tokens() == expected.tokens()
            assert stream.indices() == list(range(300))
            assert stream.text() == expected.text()

    async def counted() -> bool:
        text = await page(small)
        paused = 'ryzanstein_worker_paused_total{cause="priority",model="demo"} 3.0' in text
        return paused and 'ryzanstein_worker_resumed_total{model="demo"} 3.0' in text

    await eventually(counted, 5, "three pauses and three resumptions")
    assert 'ryzanstein_worker_class_tokens_total{kind="decode",model="demo",priority="5"} 12.0' in await page(small)


async def test_a_full_line_refuses_with_the_time_to_come_back_and_a_light_tenant_still_gets_in(small, connect, attempt, page):
    async with connect(small.address) as link:
        await link.run(attempt(max_tokens=20, ignore_eos=True))
        heavy = [await link.submit(of(attempt(f"{i}", max_tokens=1500, ignore_eos=True), tenant="heavy")) for i in range(30)]
        # Sixteen wait, and two run if a step began meanwhile. On a slow machine some end before the last ones come.
        await link.until(lambda: any(link.streams[handle].failed for handle in heavy))
        assert not any(link.streams[handle].failed for handle in heavy[:16])
        for handle in (handle for handle in heavy if link.streams[handle].failed):
            failed = link.streams[handle].failed
            assert (failed.code, failed.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert 0 < failed.retry_delay.ToNanoseconds() <= 60e9
            assert not failed.node_fault
        light = await link.run(of(attempt("hello", max_tokens=5, ignore_eos=True), tenant="light"))
        assert len(light.tokens()) == 5
        unfinished = [handle for handle in heavy if not link.streams[handle].finished and not link.streams[handle].failed]
        assert unfinished, "it did not wait behind them"
    text = await page(small)
    assert 'ryzanstein_worker_shed_total{cause="full",model="demo"}' in text
    assert "heavy" not in text, "no tenant is a label"


async def test_an_objective_refuses_at_once_who_would_wait_too_long(start_node, connect, attempt):
    node = start_node("--max-sequences", "2", "--ttft-objective-s", "0.05", tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        for _ in range(3):
            await link.run(attempt(max_tokens=100, ignore_eos=True))
        handles = [await link.submit(attempt(f"{i}", max_tokens=400, ignore_eos=True)) for i in range(12)]
        for handle in handles[4:]:
            await link.wait(handle, lambda s: s.failed)
            failed = link.streams[handle].failed
            assert (failed.code, failed.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert float(failed.metadata["expected_wait_s"]) > 0.04
        for handle in handles[:2]:
            await link.wait(handle, lambda s: s.finished)


@pytest.mark.parametrize("name", ["ttft_objective_s", "tpot_objective_s"])
def test_an_objective_has_bounds(name):
    with pytest.raises(ValueError, match=name):
        WorkerSettings(**{name: -1.0})
