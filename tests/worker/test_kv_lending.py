"""Two models of a node, as processes, lend each other KV memory; answers do not change."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.cluster, pytest.mark.long]

OWN = 20  # blocks of 16 tokens: two answers of 150 tokens
TOKENS = 150
MOVED = (("kv_bytes_borrowed", "second"), ("kv_bytes_lent", "demo"))


@pytest.fixture
async def node(start_node: Any, second: Path) -> Any:
    borrowing = ("--tuning", json.dumps({"kv_borrow_bytes": 2**26}))
    started = start_node("--more-models", str(second), "--num-blocks", str(OWN), *borrowing, tp=2)
    async with asyncio.timeout(60):
        while sum(line["event"] == "ranks ready" for line in started.events) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return started


def metrics(node: Any) -> dict[tuple[str, str], float]:
    """The worker's samples, by name and model."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=10).read().decode()
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {(each.name.removeprefix("ryzanstein_worker_"), each.labels.get("model", "")): each.value for each in samples}


def asked(attempt: Any, model: str, number: int) -> Any:
    each = attempt(f"Count from {number} to 200.", max_tokens=TOKENS, ignore_eos=True, seed=number, temperature=1.0)
    return replace(each, request=replace(each.request, model=model), generation_id=f"{model}-{number}")


async def answers(link: Any, attempt: Any, model: str, numbers: range) -> list[Any]:
    streams = await asyncio.gather(*(link.run(asked(attempt, model, number), 120) for number in numbers))
    assert [stream.failed for stream in streams] == [None] * len(streams)
    return [stream.rows for stream in streams]


async def test_a_model_borrows_what_the_other_does_not_need_and_gives_it_back_when_it_does(
    node: Any, connect: Any, attempt: Any
) -> None:
    async with connect(node.address) as demo, connect(node.address, model="second") as link:
        alone = [(await answers(link, attempt, "second", range(number, number + 1)))[0] for number in range(8)]
        own = [(await answers(demo, attempt, "demo", range(number, number + 1)))[0] for number in range(4)]

        crowd = asyncio.create_task(answers(link, attempt, "second", range(8)))
        async with asyncio.timeout(60):
            seen: dict[tuple[str, str], float] = {}
            while not all(seen.get(key) for key in MOVED):
                assert not crowd.done(), f"nothing is lent: {seen}"
                seen = await asyncio.to_thread(metrics, node)
        assert seen["kv_blocks_limit", "second"] > OWN
        assert await answers(demo, attempt, "demo", range(4)) == own
        assert await crowd == alone
        again = asyncio.create_task(answers(demo, attempt, "demo", range(4)))
        async with asyncio.timeout(60):
            while (seen := await asyncio.to_thread(metrics, node))["kv_blocks_limit", "demo"] < OWN and not again.done():
                pass
        assert seen["kv_blocks_limit", "demo"] >= OWN, "the owner has its own blocks back"
        assert await again == own
