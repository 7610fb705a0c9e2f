"""What only Redis can do to sessions: lose parts of them, be restarted, refuse us, and be shared with other clusters."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.router.sessions.claims import ClaimRequest
from ryzanstein.router.sessions.store import SessionBounds
from ryzanstein.router.sessions.stores.redis import RedisSessions
from ryzanstein.storage.redis_client import redis_client
from ryzanstein.storage.redis_url import address, checked_redis_url

HELLO = (Message(Role.USER, "hello"), Message(Role.ASSISTANT, "hi"))


async def opened(url: str, prefix: str = "test:") -> RedisSessions:
    return await RedisSessions.open(redis_client(url), prefix, SessionBounds(), lambda count: None)


async def test_a_session_that_has_lost_messages_is_refused_and_not_answered_without_them(start_redis: Any) -> None:
    redis = await start_redis()
    store, client = await opened(redis.url), redis_client(redis.url)
    await store.create("s", "m", HELLO)
    await client.delete("test:messages:s")
    with pytest.raises(RyzansteinError, match="0 of 2 messages") as failure:
        await store.get("s")
    assert (failure.value.code, failure.value.reason) == (Code.FAILED_PRECONDITION, "SESSION_DAMAGED")
    await client.aclose()
    await store.close()


async def test_a_server_that_was_restarted_between_two_commands_is_found_again(start_redis: Any) -> None:
    redis = await start_redis()
    store = await opened(redis.url)
    await store.create("s", "m", HELLO)
    await redis.kill()
    await redis.start()
    await store.append("s", HELLO, model="m", node_id="a", generation_id="g")
    assert (await store.get("s")).messages == (*HELLO, *HELLO)
    await store.close()


async def test_clusters_with_prefixes_of_their_own_share_a_server(start_redis: Any) -> None:
    redis = await start_redis()
    one, other = await opened(redis.url, "one:"), await opened(redis.url, "other:")
    await one.create("s", "m", HELLO)
    await other.create("s", "n")
    await one.claim(ClaimRequest("s", "g", "r", 60.0))
    await other.claim(ClaimRequest("s", "h", "r", 60.0))
    await other.delete("s")
    assert [session.model for session in (await one.list()).sessions] == ["m"]
    await one.close()
    await other.close()


async def test_nothing_of_a_deleted_session_is_left(start_redis: Any) -> None:
    redis = await start_redis()
    store, client = await opened(redis.url), redis_client(redis.url)
    await store.create("s", "m", HELLO)
    await store.claim(ClaimRequest("s", "g", "r", 60.0))
    await store.append("s", HELLO, model="m", node_id="a", generation_id="g")
    await store.delete("s")
    assert await client.keys("*") == []
    await client.aclose()
    await store.close()


async def test_a_server_that_may_evict_is_warned_of(start_redis: Any) -> None:
    redis = await start_redis()
    client = redis_client(redis.url)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    with capture_logs() as logs:
        store = await opened(redis.url)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["Redis may evict sessions"]
    await client.aclose()
    await store.close()


async def test_wrong_credentials_are_reported_at_the_start_without_the_password(start_redis: Any) -> None:
    redis = await start_redis(password="right")
    await (await opened(redis.url)).close()
    with pytest.raises(RyzansteinError) as failure:
        await opened(redis.url.replace("right", "hunter2"))
    assert failure.value.reason == "SESSION_STORE_REFUSED"
    assert "hunter2" not in failure.value.message


@pytest.mark.parametrize(
    ("url", "visible"),
    [
        ("redis://user:secret@host:7000/2?client_name=secret", "redis://host:7000/2"),
        ("rediss://host", "rediss://host:6379"),
        ("unix://user:secret@/run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_what_is_shown_of_a_url_has_no_secret(url: str, visible: str) -> None:
    assert checked_redis_url(url) == url
    assert address(url) == visible


@pytest.mark.parametrize(
    "url", ["", "host:6379", "http://:secret@host", "redis://", "redis://:secret@host:0", "redis://:secret@h:x"]
)
def test_a_url_that_is_none_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match="must") as failure:
        checked_redis_url(url)
    assert "secret" not in str(failure.value)
