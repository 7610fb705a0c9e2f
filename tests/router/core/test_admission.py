"""Who may come in: the bounds hold however many ask in one instant, and every way out gives the place back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt, TokenPrompt
from ryzanstein.router.core.admission import Admission, Limits, Place
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.requests import chat_from_wire

BOUND = 8
CALLERS = 60


def chat(session_id: str = "", tokens: int = 20, **more: Any) -> inference.ChatRequest:
    return inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens),
        session_id=session_id,
        **more,
    )


async def outcome(call: Any) -> str:
    """`OK`, or the reason of the refusal."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error).reason
    except RyzansteinError as error:
        return error.reason
    return "OK"


async def submitted(client: Any, **more: Any) -> list[str]:
    """What becomes of `CALLERS` sessions that begin in one instant."""
    requests = [replace(chat_from_wire(chat(f"s{i}")), **more) for i in range(CALLERS)]
    return await asyncio.gather(*(outcome(client.router.core.submit(request)) for request in requests))


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_no_more_run_than_may_when_many_sessions_ask_at_once(start_node: Any, start_router: Any, store: str) -> None:
    client = await start_router(await start_node("a", step_s=0.02), max_running=BOUND, session_store=store)
    outcomes = await submitted(client)
    # The one tenant gets eight ninths of the room, rounded up.
    assert (outcomes.count("OK"), outcomes.count("QUEUE_FULL")) == (BOUND, CALLERS - BOUND)
    assert client.router.core.running == BOUND


async def test_no_tenant_gets_more_than_its_share_when_its_sessions_ask_at_once(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a", step_s=0.02), max_running=18, session_store="sqlite")
    assert (await submitted(client, tenant="heavy")).count("OK") == 16
    assert (await submitted(client, tenant="light")).count("OK") == 2


async def test_no_more_wait_than_may_when_many_sessions_ask_at_once(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a")
    client = await start_router(node, max_waiting=BOUND, session_store="sqlite")
    node.state = worker.NODE_STATE_RECOVERING
    await until(lambda: not client.router.core.ready)
    assert (await submitted(client)).count("OK") == BOUND
    assert client.value("generations_waiting") == BOUND
    node.state = worker.NODE_STATE_READY
    await until(lambda: client.value("generations_waiting") == 0)


async def test_a_place_is_given_back_however_a_request_ends(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, max_running=4, session_store="sqlite", max_session_messages=2)
    assert [await outcome(client.inference.Chat(chat("full", tokens=1))) for _ in range(6)] == ["OK"] + 5 * ["SESSION_FULL"]
    assert {await outcome(client.inference.Chat(chat(model="none"))) for _ in range(6)} == {"MODEL_NOT_FOUND"}
    calls = [client.inference.Chat(chat(f"left-{i}", tokens=500)) for i in range(3)]
    await until(lambda: len(node.submits) == 4)
    for call in calls:
        call.cancel()
    await until(lambda: client.router.core.running == 0)
    calls = [client.inference.Chat(chat("busy", tokens=50)) for _ in range(3)]
    assert sorted([await outcome(call) for call in calls]) == ["OK", "SESSION_BUSY", "SESSION_BUSY"]
    assert [await outcome(client.inference.Chat(chat(f"after-{i}", tokens=1))) for i in range(4)] == 4 * ["OK"]


PROMPT = "x" * 400_000


def long(session_id: str = "", text: str = PROMPT, **more: Any) -> inference.ChatRequest:
    request = chat(session_id, **more)
    request.messages[0].content = text
    return request


async def test_the_prompts_of_all_generations_are_bounded_in_bytes(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01, freeze_at=3)
    client = await start_router(node, max_held_prompt_bytes=2**20, session_store="memory")
    begun = [asyncio.ensure_future(outcome(client.inference.Chat(long()))) for _ in range(2)]
    await until(lambda: len(node.submits) == 2)
    assert 2 * len(PROMPT) < client.value("held_prompt_bytes") < 2**20
    refused = await outcome(client.inference.Chat(long()))
    assert (refused, client.value("refused_total", reason="prompt_bytes")) == ("QUEUE_FULL", 1)
    assert await outcome(client.inference.Chat(chat(tokens=2))) == "OK", "a short one fits"
    node.freeze_at = None
    assert await asyncio.gather(*begun) == ["OK", "OK"]
    await until(lambda: client.value("held_prompt_bytes") == 0)
    assert client.value("generations_retained") == 3, "answers that can be read hold no prompt"


async def test_the_memory_of_a_prompt_is_given_back_however_its_request_ends(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, max_held_prompt_bytes=2**20, session_store="sqlite", reattach_window_s=0.3)
    assert await outcome(client.inference.Chat(long("s", tokens=1))) == "OK"
    assert await outcome(client.inference.Chat(long(model="none"))) == "MODEL_NOT_FOUND"
    node.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG")
    assert await outcome(client.inference.Chat(long())) == "CONTEXT_TOO_LONG"
    assert client.value("held_prompt_bytes") == 0, "at once, not at the end of its window"
    node.refuse = None
    seen = len(node.submits)
    left = client.inference.Chat(long(tokens=500))
    await until(lambda: len(node.submits) > seen)
    left.cancel()
    await until(lambda: client.value("held_prompt_bytes") == 0)
    node.freeze_at = 0
    running = asyncio.ensure_future(outcome(client.inference.Chat(long(tokens=1))))
    await until(lambda: client.value("held_prompt_bytes") > 0)
    assert (await outcome(client.inference.Chat(long("s", tokens=1)))) == "QUEUE_FULL", "with what its session has"
    node.freeze_at = None
    assert await running == "OK"
    await until(lambda: client.value("held_prompt_bytes") == 0)
    assert (await outcome(client.inference.Chat(long("s", tokens=1)))) == "OK"


async def test_a_prompt_that_is_alone_is_never_too_large_and_a_tenant_leaves_room(start_node: Any, start_router: Any) -> None:
    admission = Admission(Limits(max_held_prompt_bytes=900), RouterTelemetry())
    alone = admission.hold("a", TextPrompt("x" * 5000))
    with pytest.raises(RyzansteinError, match="too many long prompts"):
        admission.hold("b", TextPrompt(""))
    alone.release()
    alone.release()
    assert admission.held_bytes == 0
    held = [admission.hold("a", TokenPrompt((1,))) for _ in range(23)]
    with pytest.raises(RyzansteinError, match="too many long prompts"):
        admission.hold("a", TokenPrompt((1,)))
    held.append(admission.hold("b", TokenPrompt((1,))))
    for each in held:
        each.release()
    assert admission.held_bytes == 0


TENANTS = st.sampled_from(["a", "b", "c"])


@given(asked=st.lists(st.tuples(TENANTS, st.sampled_from(["enter", "launch", "start", "leave"]), st.integers(0, 20))))
def test_over_any_order_of_events_the_bounds_hold_and_nothing_is_left(asked: list[tuple[str, str, int]]) -> None:
    admission = Admission(Limits(max_running=6, max_waiting=2), RouterTelemetry())
    entered: list[Place] = []
    launched: list[Place] = []
    waiting = 0
    for tenant, event, number in asked:
        if event == "enter":
            place = None
            try:
                place = admission.enter(tenant)
                place.wait_for("m", waiting)
                entered.append(place)
            except RyzansteinError:
                if place is not None:
                    place.leave()
        elif event == "launch" and entered:
            launched.append(entered.pop(number % len(entered)))
            launched[-1].launched()
            waiting += 1
        elif event == "start":
            waiting -= waiting > 0
        elif event == "leave" and entered + launched:
            place = (entered + launched)[number % len(entered + launched)]
            (entered if place in entered else launched).remove(place)
            place.leave()
            place.leave()
            waiting = min(waiting, len(launched))
        assert admission.running == len(entered) + len(launched) <= 6
        assert admission.entering("m") + waiting <= 2
    for place in entered + launched:
        place.leave()
    assert admission.running == admission.entering("m") == 0


def test_a_tenant_that_is_alone_gets_eight_ninths_and_leaves_room_for_another() -> None:
    admission = Admission(Limits(max_running=18), RouterTelemetry())
    mine = [admission.enter("heavy") for _ in range(16)]
    with pytest.raises(RyzansteinError, match="too many requests: 16, the bound is 16"):
        admission.enter("heavy")
    admission.enter("light")
    for place in mine:
        place.leave()
    assert admission.running == 1
