"""What tenants are charged, over everything that happens to generations: each token once, and nothing for what was not done."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.embeddings import Embedded, EmbeddingRequest
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.router.access.limits.usage import NOTHING, UsageCount, this_month
from ryzanstein.router.core import embeddings
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

ACME = (("x-tenant-id", "acme"),)
PROMPT = 7
"""Tokens of every prompt, as scripted nodes count."""
TEXT = "x" * 3 * 100
"""A prompt that is estimated at about a hundred tokens."""


def limit(router: Any, **limits: Any) -> None:
    router.router.allowance.limits_of = lambda tenant: TenantLimits(**limits) if tenant == "acme" else TenantLimits()


def chat(tokens: int = 4, text: str = "hello", key: str = "", session_id: str = "", **sampling: Any) -> inference.ChatRequest:
    return inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content=text)],
        sampling=inference.SamplingParams(max_tokens=tokens, **sampling),
        request_id=key,
        session_id=session_id,
    )


async def ask(router: Any, metadata: Any = ACME, **asked: Any) -> Any:
    return await router.inference.Chat(chat(**asked), metadata=metadata)


async def refused(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


async def used(router: Any, tenant: str = "acme") -> UsageCount:
    rows = await router.router.allowance.usage("", tenant)
    assert [row.month for row in rows] in ([], [this_month()])
    return rows[0].count if rows else NOTHING


def holds(router: Any) -> float:
    return float(router.value("holds"))


async def test_a_tenant_without_limits_is_counted(start_node: Any, start_router: Any) -> None:
    router = await start_router(await start_node("a"))
    await ask(router, tokens=5)
    await ask(router, tokens=6)
    await ask(router, tokens=1, metadata=())
    assert await used(router) == UsageCount(2, 2 * PROMPT, 11)
    assert await used(router, "") == UsageCount(1, PROMPT, 1)
    assert router.value("tenant_tokens_total", tenant="acme", kind="generated") == 11
    assert router.value("tenant_tokens_total", tenant="acme", kind="prompt") == 14
    assert holds(router) == 0


async def test_requests_above_the_rate_are_refused_and_say_when_to_come_back(start_node: Any, start_router: Any) -> None:
    router = await start_router(await start_node("a"))
    limit(router, requests_per_second=0.5, burst=2)
    await ask(router)
    await ask(router)
    error = await refused(ask(router))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 1 < (error.retry_after_s or 0) <= 2
    assert (error.metadata["quota"], error.metadata["limit"], error.metadata["remaining"]) == (
        "requests_per_second",
        "0.5",
        "0",
    )
    assert error.metadata["reset"] in ("3s", "4s")
    await ask(router, metadata=())  # another tenant
    assert router.value("limited_total", limit="requests_per_second") == 1
    assert (await used(router)).requests == 2


async def test_an_estimate_is_replaced_by_what_the_node_counts(start_node: Any, start_router: Any) -> None:
    router = await start_router(await start_node("a"))
    limit(router, tokens_per_minute=1000)
    await ask(router, text=TEXT, tokens=3)
    shown = router.router.allowance.shown("acme")
    assert shown["x-ratelimit-limit-tokens"] == "1000"
    assert 1000 - int(shown["x-ratelimit-remaining-tokens"]) in (PROMPT + 3, PROMPT + 2)  # it fills by 17 a second
    assert shown["x-ratelimit-reset-tokens"].endswith("ms")


async def test_an_answer_that_has_begun_goes_into_debt_and_the_next_request_waits(start_node: Any, start_router: Any) -> None:
    router = await start_router(await start_node("a", step_s=0.0005))
    limit(router, tokens_per_minute=600)
    answer = await ask(router, tokens=700)
    assert answer.usage.completion_tokens == 700
    error = await refused(ask(router))
    assert error.metadata["quota"] == "tokens_per_minute"
    assert 5 < (error.retry_after_s or 0) < 15


async def test_what_is_asked_for_is_not_charged_but_what_is_generated(start_node: Any, start_router: Any, until: Any) -> None:
    """A client asks for sixteen answers of 32,000 tokens and leaves at the third."""
    router = await start_router(await start_node("a", context_length=1_000_000, step_s=0.02))
    limit(router, tokens_per_minute=1000, concurrent=1)
    metadata = (*ACME, ("x-on-disconnect", "cancel"))
    stream = router.inference.StreamChat(inference.StreamChatRequest(chat=chat(32_000, n=16)), metadata=metadata)
    seen = 0
    async for response in stream:
        seen += len(response.event.delta.token_ids)
        if seen >= 3 * 16:
            break
    generation = next(iter(router.router.core._lifecycle._running))
    router.router.core._lifecycle.cancel(generation)
    await until(lambda: holds(router) == 0)
    count = await used(router)
    assert count == UsageCount(1, PROMPT, generation.log.num_tokens)
    assert 48 <= count.generated < 320
    await ask(router)


async def test_a_failover_charges_each_token_once(start_node: Any, start_router: Any) -> None:
    nodes = [await start_node("a", die_at=5), await start_node("b", die_at=9)]
    router = await start_router(*nodes)
    limit(router, tokens_per_minute=10_000)
    answer = await ask(router, tokens=12)
    assert answer.usage.completion_tokens == 12
    assert await used(router) == UsageCount(1, PROMPT, 12)
    assert sum(len(node.submits) for node in nodes) > 1


async def test_the_running_generations_of_a_tenant_are_bounded(start_node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(await start_node("a", step_s=0.01))
    limit(router, concurrent=1)
    first = asyncio.ensure_future(ask(router, tokens=30))
    await until(lambda: holds(router) == 1)
    error = await refused(ask(router))
    assert (error.reason, error.metadata["quota"], error.metadata["limit"]) == ("RATE_LIMITED", "concurrent", "1")
    await first
    for _ in range(20):  # at once: nothing is held of what has ended
        await ask(router, tokens=1)


async def test_the_month_refuses_without_a_time_and_nothing_else_is_charged(start_node: Any, start_router: Any) -> None:
    router = await start_router(await start_node("a"))
    limit(router, tokens_per_month=20, requests_per_second=100)
    await ask(router, tokens=10)
    error = await refused(ask(router, text=TEXT))
    assert (error.reason, error.retry_after_s) == ("QUOTA_EXHAUSTED", None)
    assert (error.metadata["quota"], error.metadata["limit"], error.metadata["remaining"]) == ("tokens_per_month", "20", "3")
    assert await used(router) == UsageCount(1, PROMPT, 10)
    await ask(router, tokens=10)  # a shorter one still fits, and is not cut
    assert (await used(router)).tokens == 2 * (PROMPT + 10)
    assert (await refused(ask(router))).reason == "QUOTA_EXHAUSTED"


async def test_a_hard_month_ends_an_answer_at_its_length(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.0005)
    router = await start_router(node)
    limit(router, tokens_per_month=400, hard_month=True)
    answer = await ask(router, tokens=3000)
    assert answer.choices[0].finish_reason == inference.FINISH_REASON_LENGTH
    assert 400 - PROMPT <= answer.usage.completion_tokens <= 400 + 256
    await until(lambda: node.num_running == 0)
    assert await used(router) == UsageCount(1, PROMPT, answer.usage.completion_tokens)
    assert holds(router) == 0


async def test_a_longer_answer_than_the_tenant_may_have_is_refused_and_one_without_bound_is_bounded(
    start_node: Any, start_router: Any
) -> None:
    router = await start_router(await start_node("a", default_tokens=100))
    limit(router, max_tokens=10)
    error = await refused(ask(router, tokens=11))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "sampling.max_tokens")
    assert "at most 10" in error.message
    unbounded = inference.ChatRequest(messages=[inference.Message(role="ROLE_USER", content="hello")])
    answer = await router.inference.Chat(unbounded, metadata=ACME)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, inference.FINISH_REASON_LENGTH)
    assert (await router.inference.Chat(unbounded)).usage.completion_tokens == 100


async def test_a_request_that_joins_another_one_is_not_charged(start_node: Any, start_router: Any) -> None:
    router = await start_router(await start_node("a"))
    limit(router, requests_per_second=0.01, burst=1)
    first = await ask(router, key="k")
    assert (await ask(router, key="k")).usage == first.usage
    assert (await used(router)).requests == 1
    assert (await refused(ask(router, key="l"))).reason == "RATE_LIMITED"


async def test_a_refused_request_leaves_its_key_free_and_its_session_alone(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    router = await start_router(await start_node("a", step_s=0.02), unread_grace_s=60)
    limit(router, concurrent=1)
    stream = router.inference.StreamChat(inference.StreamChatRequest(chat=chat(40, session_id="s")), metadata=ACME)
    await stream.read()
    stream.cancel()
    (generation,) = router.router.core._lifecycle._running
    await until(lambda: generation.unread)
    error = await refused(ask(router, key="k", session_id="s"))
    assert error.reason == "RATE_LIMITED"
    assert generation in router.router.core._lifecycle._running  # a new turn would have ended it
    await until(lambda: holds(router) == 0)
    await ask(router, key="k", session_id="s")


async def test_a_request_that_does_not_begin_gives_its_tokens_back(start_node: Any, start_router: Any) -> None:
    router = await start_router(await start_node("a"))
    limit(router, tokens_per_minute=1000)
    unknown = inference.ChatRequest(model="none", messages=[inference.Message(role="ROLE_USER", content=TEXT)])
    assert (await refused(router.inference.Chat(unknown, metadata=ACME))).code == Code.NOT_FOUND
    assert router.router.allowance.shown("acme")["x-ratelimit-remaining-tokens"] == "1000"
    assert await used(router) == NOTHING
    assert holds(router) == 0


async def test_a_paused_generation_holds_nothing_and_is_charged_once_when_it_goes_on(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    router = await start_router(await start_node("a", step_s=0.01), unread_grace_s=0.1)
    limit(router, concurrent=1, tokens_per_minute=10_000)
    stream = router.inference.StreamChat(inference.StreamChatRequest(chat=chat(60)), metadata=ACME)
    started = (await stream.read()).event.started
    await stream.read()
    stream.cancel()
    await until(lambda: router.value("generations_paused_total") == 1)
    assert holds(router) == 0
    before = await used(router)
    assert 0 < before.generated < 60
    again = router.inference.AttachGeneration(
        inference.AttachGenerationRequest(generation_id=started.generation_id), metadata=ACME
    )
    assert holds(router) == 0
    async for _ in again:
        pass
    assert await used(router) == UsageCount(1, PROMPT, 60)


async def test_counts_outlive_the_router(start_node: Any, start_router: Any, tmp_path: Any) -> None:
    node = await start_node("a")
    first = await start_router(node, session_store="sqlite")
    limit(first, tokens_per_month=30)
    await ask(first, tokens=20)
    assert (await used(first)).tokens == PROMPT + 20
    second = await start_router(node, session_store="sqlite", state_dir=tmp_path / "second", session_dir=tmp_path)
    limit(second, tokens_per_month=28)
    assert (await refused(ask(second))).reason == "QUOTA_EXHAUSTED"
    assert await used(second) == UsageCount(1, PROMPT, 20)


@pytest.mark.parametrize("store", ["sqlite", "redis"])
async def test_a_generation_that_moves_to_another_router_is_charged_once(
    start_node: Any, start_router: Any, start_redis: Any, tmp_path: Any, store: str
) -> None:
    node = await start_node("a", step_s=0.01)
    settings: dict[str, Any] = {"session_store": store, "session_dir": tmp_path}
    if store == "redis":
        settings["redis_url"] = (await start_redis()).url
    first, second = [await start_router(node, state_dir=tmp_path / str(i), **settings) for i in range(2)]
    for router in (first, second):
        limit(router, tokens_per_minute=100_000, concurrent=2, tokens_per_month=1_000_000)
    stream = first.inference.StreamChat(inference.StreamChatRequest(chat=chat(100)), metadata=ACME)
    generation_id = (await stream.read()).event.started.generation_id
    for _ in range(5):
        await stream.read()
    for server in (first.server, first.peers):  # nobody reaches it, and it does not know
        await server.stop(0)
    again = second.inference.AttachGeneration(
        inference.AttachGenerationRequest(generation_id=generation_id), metadata=ACME, timeout=20
    )
    events = [response.event async for response in again]
    assert sum(len(event.delta.token_ids) for event in events) == 100
    assert second.value("generations_taken_over_total", cause="unreachable") == 1
    assert await used(second) == UsageCount(1, PROMPT, 100)
    assert (await used(first)) == UsageCount(1, PROMPT, 100)
    await ask(second, tokens=1)


async def test_vectors_are_charged_for_their_inputs_at_the_end(
    start_node: Any, start_router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await start_router(await start_node("a"))
    limit(router, tokens_per_minute=1000, concurrent=1)
    core = router.router.core
    failing = True

    async def answering(link: Any, asked: EmbeddingRequest, inputs: Any) -> list[Embedded]:
        assert holds(router) == 1
        if failing:
            raise errors.invalid("dimensions", "must be at most 8")
        return [Embedded(array("f", [1.0]), 5) for _ in inputs]

    monkeypatch.setattr(embeddings, "embed", answering)
    request = EmbeddingRequest("demo", (TextPrompt(TEXT), TextPrompt(TEXT)), tenant="acme")
    with pytest.raises(RyzansteinError):
        await core.embed(request)
    assert await used(router) == NOTHING
    failing = False
    assert len(await core.embed(request)) == 2
    assert await used(router) == UsageCount(1, 10, 0)
    assert int(router.router.allowance.shown("acme")["x-ratelimit-remaining-tokens"]) >= 990
    assert holds(router) == 0
