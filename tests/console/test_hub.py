"""The answers of one person: bounds, and what is kept when there is no more room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ryzanstein.client import AsyncClient, ClientError
from ryzanstein.console.answers import hub as hub_module
from ryzanstein.console.answers.hub import Hub, KeptAnswer
from ryzanstein.console.answers.questions import Question, tools_of
from ryzanstein.console.answers.restarts import AnswerNote, RestartNotes
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import Sampling, ToolResult
from ryzanstein.errors import Code
from ryzanstein.lab.pages.scripted_router import Script, ScriptedRouter
from ryzanstein.v1 import inference_pb2 as pb


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
    kept = await ended(hub.ask("s", Question("one two"), Sampling()))
    assert (kept.sheet.status, kept.sheet.tokens, hub.running) == ("complete", 2, 0)
    assert kept.sheet.says("onetwo")


async def test_the_oldest_answers_that_have_ended_make_room(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOST_ANSWERS", 3)
    asked = [await ended(hub.ask("s", Question(f"question {number}"), Sampling())) for number in range(5)]
    assert list(hub.answers) == [kept.sheet.answer_id for kept in asked[2:]]


async def test_long_answers_make_room_too_and_one_that_finds_none_is_cut_and_says_so(
    hub: Hub, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "MOST_TEXT", 200_000)
    script.pieces["long"] = [("node-0", "word " * 2000) for _ in range(12)]
    script.pieces["longer"] = [("node-0", "word " * 2000) for _ in range(60)]
    first = await ended(hub.ask("s", Question("long"), Sampling()))
    second = await ended(hub.ask("s", Question("long"), Sampling()))
    assert list(hub.answers) == [second.sheet.answer_id]
    assert not first.sheet.cut
    third = await ended(hub.ask("s", Question("longer"), Sampling()))
    assert third.sheet.cut
    assert "longer than the console keeps" in third.sheet.note
    assert third.sheet.tokens == 60
    assert third.sheet.num_chars < 300_000


async def test_an_error_of_the_cluster_is_the_end_of_the_answer(hub: Hub, router: ScriptedRouter, script: Script) -> None:
    hub.client._core.metadata = (("authorization", script.refused_key),)
    kept = await ended(hub.ask("s", Question("one"), Sampling()))
    assert kept.sheet.status == "failed"
    assert "the key is not known" in kept.sheet.note
    assert "wrong" not in kept.sheet.note


async def test_what_still_runs_when_the_console_stops_is_left_and_not_cancelled(hub: Hub, script: Script) -> None:
    script.step_s = 5
    kept = hub.ask("s", Question("one two"), Sampling())
    while not kept.sheet.parts:  # noqa: ASYNC110 (as above)
        await asyncio.sleep(0.01)
    await hub.close(0)
    assert (kept.sheet.status, script.cancelled) == ("lost", set())


@pytest.fixture
def notes(tmp_path: Path) -> RestartNotes:
    return RestartNotes(tmp_path / "notes")


async def resumed(router: ScriptedRouter, notes: RestartNotes, person: str = "p") -> Hub:
    """The hub of the next process."""
    made = Hub(AsyncClient(router.address), ConsoleTelemetry(), notes, person)
    made.resume()
    return made


@pytest.mark.parametrize("number", [2, 9])
async def test_an_answer_that_runs_at_a_restart_is_read_from_its_beginning(
    router: ScriptedRouter, script: Script, notes: RestartNotes, number: int
) -> None:
    script.pieces["go"] = [("node-0" if at < 5 else "node-1", f"{at} ") for at in range(12)]
    script.step_s = 0.05
    first = Hub(AsyncClient(router.address), ConsoleTelemetry(), notes, "p")
    kept = first.ask("s", Question("go"), Sampling())
    while kept.sheet.tokens < number:  # noqa: ASYNC110 (as above)
        await asyncio.sleep(0.01)
    await first.close(0)
    assert (await resumed(router, notes, "somebody else")).answers == {}
    second = await resumed(router, notes)
    again = await ended(second.answers[kept.sheet.answer_id])
    assert (again.session, again.question) == ("s", Question("go"))
    assert again.sheet.says("".join(f"{at} " for at in range(12)))
    assert [(each.node, each.tokens) for each in again.sheet.parts] == [("node-0", 5), ("node-1", 7)]
    assert (script.attached, len(script.asked)) == (["generation-1"], 1)
    await second.close(1)
    assert notes.answers("p") == {}, "it has ended: there is nothing to resume"


async def test_an_answer_that_ended_while_no_console_ran_is_that_of_its_session(
    router: ScriptedRouter, notes: RestartNotes
) -> None:
    notes.write_answer("answer-1", AnswerNote("p", "s", "go", (), "generation-99"))
    gone: list[KeptAnswer] = []
    hub = Hub(AsyncClient(router.address), ConsoleTelemetry(), notes, "p")
    hub.on_gone.append(gone.append)
    hub.resume()
    async with asyncio.timeout(20):
        while hub.running:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.01)
    assert [each.session for each in gone] == ["s"]
    assert (hub.answers, notes.answers("p")) == ({}, {})
    await hub.close(0)


async def test_a_question_that_no_node_had_taken_says_so(router: ScriptedRouter, notes: RestartNotes) -> None:
    notes.write_answer("answer-1", AnswerNote("p", "s", "go"))
    hub = await resumed(router, notes)
    sheet = hub.answers["answer-1"].sheet
    assert (sheet.status, hub.running, notes.answers("p")) == ("lost", 0, {})
    assert "Retry" in sheet.note
    await hub.close(0)


def test_notes_are_private_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    notes = RestartNotes(tmp_path / "deep" / "notes")
    notes.write_answer("a", AnswerNote("p", "s", "go", (), "g"))
    notes.write_answer("b", AnswerNote("p", "s", "go", (), "g"))
    file = tmp_path / "deep/notes/answers/a.json"
    assert (file.stat().st_mode & 0o077, file.parent.stat().st_mode & 0o077) == (0, 0)
    file.write_text('{"person": "p"')
    assert list(notes.answers("p")) == ["b"]
    file.write_text("[]")
    assert list(notes.answers("p")) == ["b"]
    assert RestartNotes(None).answers("p") == RestartNotes(None).logins() == {}


def test_notes_that_cannot_be_written_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    notes = RestartNotes(tmp_path / "file" / "below")
    notes.write_answer("a", AnswerNote("p", "s", "go"))
    notes.write_logins({})
    assert (notes.answers("p"), notes.logins()) == ({}, {})


async def test_a_retry_asks_in_the_conversation_before_it(hub: Hub, script: Script, router: ScriptedRouter) -> None:
    await ended(hub.ask("s", Question("one"), Sampling()))
    again = await ended(await hub.retry("s", Sampling()))
    assert (again.session != "s", again.question.text) == (True, "one")
    assert router.sessions[again.session].messages[0].content == "one", "nothing came before it"
    script.pieces["two"] = [("node-0", "x")] * 500
    script.step_s = 0.02
    failing = hub.ask("s", Question("two"), Sampling())
    await asyncio.sleep(0.1)
    failing.sheet.fail(ClientError("no node", Code.UNAVAILABLE, ""))
    script.step_s = 0
    third = await ended(await hub.retry("s", Sampling()))
    assert third.question.text == "two"
    assert [each.content for each in router.sessions[third.session].messages][:3] == ["one", "one", "two"]


async def test_results_of_tools_are_asked_and_asked_again(hub: Hub, script: Script, router: ScriptedRouter) -> None:
    called = pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(id="call-1", name="now")])
    router.sessions["s"] = pb.Session(session_id="s", messages=[pb.Message(role=pb.ROLE_USER, content="hi"), called])
    question = Question(results=(ToolResult("call-1", "now", "noon"),))
    tools = Sampling(tools='[{"type": "function", "function": {"name": "now"}}]', tool_choice="required")
    first = await ended(hub.ask("s", question, tools))
    (message,) = script.asked[-1].messages
    assert (message.role, message.tool_call_id, message.content) == (pb.ROLE_TOOL, "call-1", "noon")
    assert [tool.name for tool in script.asked[-1].tools] == ["now"]
    assert script.asked[-1].tool_choice.mode == pb.TOOL_MODE_REQUIRED
    again = await ended(await hub.retry("s", Sampling()))
    assert again.question.says(first.question)
    kept = router.sessions[again.session].messages
    assert [each.role for each in kept] == [pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_TOOL, pb.ROLE_ASSISTANT]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", "tool 1 has no name"),
        ('[{"name": "a"}, {"function": {"name": 7}}]', "tool 2 has no name"),
        ('{"name": "a", "description": 7}', "description must be a text"),
        ('{"name": "a", "parameters": "x"}', "must be a JSON schema"),
        ("[" + ", ".join(['{"name": "a"}'] * 65) + "]", "at most 64"),
    ],
)
def test_tools_that_cannot_be_ones_are_refused_with_a_sentence(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tools_of(text)


def test_tools_are_a_list_or_one() -> None:
    assert [tools_of(text) for text in ("", " \n", '{"name": "a"}', '[{"name": "a"}]')] == [
        [],
        [],
        [{"name": "a"}],
        [{"name": "a"}],
    ]
