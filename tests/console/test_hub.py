"""The answers of one person: bounds, and what is kept when there is no more room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.console.conftest import Script, ScriptedRouter

from ryzanstein.client import AsyncClient
from ryzanstein.console import hub as hub_module
from ryzanstein.console.hub import Hub, KeptAnswer
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import Sampling


@pytest.fixture
async def hub(router: ScriptedRouter) -> AsyncIterator[Hub]:
    telemetry = ConsoleTelemetry()
    made = Hub(AsyncClient(router.address), telemetry)
    yield made
    await made.close(0)
    await telemetry.background.close()


async def ended(kept: KeptAnswer) -> KeptAnswer:
    async with asyncio.timeout(20):
        while not kept.sheet.over or kept.sheet.layout(watched=True):  # noqa: ASYNC110 (it is looked at from outside)
            await asyncio.sleep(0.01)
    return kept


async def test_an_answer_is_read_when_nobody_looks_at_it(hub: Hub, script: Script) -> None:
    kept = await ended(hub.ask("s", "one two", Sampling()))
    assert (kept.sheet.status, kept.sheet.tokens, hub.running) == ("complete", 2, 0)
    assert kept.sheet.says("onetwo")


async def test_the_oldest_answers_that_have_ended_make_room(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOST_ANSWERS", 3)
    asked = [await ended(hub.ask("s", f"question {number}", Sampling())) for number in range(5)]
    assert list(hub.answers) == [kept.sheet.answer_id for kept in asked[2:]]


async def test_long_answers_make_room_too_and_one_that_finds_none_is_cut_and_says_so(
    hub: Hub, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "MOST_TEXT", 200_000)
    script.pieces["long"] = [("node-0", "word " * 2000) for _ in range(12)]
    script.pieces["longer"] = [("node-0", "word " * 2000) for _ in range(60)]
    first = await ended(hub.ask("s", "long", Sampling()))
    second = await ended(hub.ask("s", "long", Sampling()))
    assert list(hub.answers) == [second.sheet.answer_id]
    assert not first.sheet.cut
    third = await ended(hub.ask("s", "longer", Sampling()))
    assert third.sheet.cut
    assert "longer than the console keeps" in third.sheet.note
    assert third.sheet.tokens == 60
    assert third.sheet.num_chars < 300_000


async def test_an_error_of_the_cluster_is_the_end_of_the_answer(hub: Hub, router: ScriptedRouter, script: Script) -> None:
    hub.client._core.metadata = (("authorization", script.refused_key),)
    kept = await ended(hub.ask("s", "one", Sampling()))
    assert kept.sheet.status == "failed"
    assert "the key is not known" in kept.sheet.note
    assert "wrong" not in kept.sheet.note


async def test_what_still_runs_when_the_console_stops_is_left_and_not_cancelled(hub: Hub, script: Script) -> None:
    script.step_s = 5
    kept = hub.ask("s", "one two", Sampling())
    while not kept.sheet.parts:  # noqa: ASYNC110 (as above)
        await asyncio.sleep(0.01)
    await hub.close(0)
    assert (kept.sheet.status, script.cancelled) == ("lost", set())
