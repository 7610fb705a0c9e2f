"""A router that was stopped blames no node for what it did not hear meanwhile."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.long

TOKENS = 1200
NODES = 3


async def total(router: Any, name: str) -> float:
    return float(await router.value(name))


@pytest.mark.parametrize("stop_s", [3.0, 5.0])
async def test_a_stopped_router_blames_no_node_and_moves_no_answer(
    start_node: Any, start_routers: Any, new_client: Any, stop_s: float
) -> None:
    nodes = [await start_node(name, step_s=0.01) for name in "abc"[:NODES]]
    # Nodes that are late because the machine is busy are no matter of this test: half a stop is much later.
    tuning = {"patience": {"accept_s": 1.2, "silence_s": 1.2}, "suspicion": {"jitter_s": 0.4}}
    (router,) = await start_routers(1, *nodes, session_store="memory", reattach_window_s=2, tuning=tuning)
    async with asyncio.timeout(20):
        while await total(router, "link_up") < NODES:  # noqa: ASYNC110 - a process tells its metrics when asked
            await asyncio.sleep(0.05)
    clients = [new_client() for _ in range(8)]
    answers = [asyncio.create_task(client.ask(router, TOKENS, session_id=f"s{i}")) for i, client in enumerate(clients)]
    absent = new_client()
    left = await absent.ask(router, 4 * TOKENS, until_tokens=5)
    left.cancel()
    async with asyncio.timeout(20):
        while any(client.seen.num_tokens < 20 for client in clients):  # noqa: ASYNC110 - clients tell nobody
            await asyncio.sleep(0.01)
    router.send(signal.SIGSTOP)
    back = asyncio.create_task(absent.come_back(router, until_tokens=absent.seen.num_tokens + 100))
    await asyncio.sleep(stop_s)
    router.send(signal.SIGCONT)
    await asyncio.gather(*answers)
    await back
    assert [client.seen.num_tokens for client in clients] == [TOKENS] * 8
    for name in ("link_losses_total", "suspicions_total", "breaker_state", "failovers_total", "hedges_total"):
        assert await total(router, name) == 0, name
    assert sum(len(node.submits) for node in nodes) == 9, "nothing was started twice"
    assert router.events("event loop stalled")
