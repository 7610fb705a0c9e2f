"""The journal's store goes away and comes back: requests go on, and what was missed is caught up."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

TOKENS = 400


def whole(tokens: int = TOKENS) -> list[int]:
    return [1000 + index for index in range(tokens)]


async def lag(router: Any) -> float:
    return float(await router.value("journal_lag_tokens"))


async def holds(condition: Any, timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the router is another process
            await asyncio.sleep(0.05)


async def test_a_locked_file_costs_no_request_and_is_caught_up(
    start_node: Any, start_routers: Any, new_client: Any, tmp_path: Path
) -> None:
    node = await start_node("a", step_s=0.01)
    first, second = await start_routers(2, node)
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=10)
    lock = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    during = new_client()
    await during.ask(first, 20)
    assert during.seen.tokens == {0: whole(20)}
    await holds(lambda: _is(first, "journal_up", 0))
    assert await lag(first) > 0
    lock.execute("ROLLBACK")
    lock.close()
    await holds(lambda: _is(first, "journal_up", 1))
    await holds(lambda: _below(first, 10))
    await first.kill()
    await client.come_back(second)
    assert client.seen.tokens == {0: whole()}
    known = sum(len(choice.token_ids) for choice in node.submits[-1].generated)
    assert known > 10, "what was generated during the outage is in the journal after it"
    assert len(first.events("journal unavailable, generations continue in memory")) == 1
    assert len(first.events("journal works again")) == 1


async def _is(router: Any, name: str, value: float) -> bool:
    return float(await router.value(name)) == value


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_redis_that_dies_costs_no_request_and_gets_back_what_it_lost(
    start_node: Any, start_routers: Any, start_redis: Any, new_client: Any, forgets: bool
) -> None:
    redis = await start_redis("secret")
    node = await start_node("a", step_s=0.01)
    first, second = await start_routers(2, node, session_store="redis", redis_url=redis.url)
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=10)
    await redis.kill()
    during = new_client()
    await during.ask(first, 20)
    assert during.seen.tokens == {0: whole(20)}
    assert await first.value("journal_outages_total") == 1
    if forgets:
        for path in sorted(redis.folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    await redis.start()
    await holds(lambda: _is(first, "journal_up", 1))
    await holds(lambda: _below(first, 20))
    await first.kill()
    await client.come_back(second)
    assert client.seen.tokens == {0: whole()}
    assert sum(len(choice.token_ids) for choice in node.submits[-1].generated) > 30
    assert "secret" not in first.log_path.read_text()


async def _below(router: Any, tokens: int) -> bool:
    return await lag(router) < tokens


async def test_what_cannot_be_looked_up_is_unavailable_and_not_unknown(
    start_node: Any, start_routers: Any, start_redis: Any, new_client: Any
) -> None:
    redis = await start_redis()
    node = await start_node("a", step_s=0.01)
    first, second = await start_routers(2, node, session_store="redis", redis_url=redis.url)
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=10)
    await redis.kill()
    with pytest.raises(Exception, match="the journal is unavailable"):
        await client.come_back(second)
    await client.come_back(first)
    assert client.seen.tokens == {0: whole()}
