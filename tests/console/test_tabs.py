"""Tabs over a real socket: one reader for many, bounds, and a slow tab that slows nobody."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.console.test_login import Answer, logged_in, socket_url
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from ryzanstein.console.answers.hub import MOST_RUNNING
from ryzanstein.console.app import MOST_SOCKETS
from ryzanstein.console.wire import MOST_BYTES
from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script, ScriptedRouter
from ryzanstein.v1 import inference_pb2 as pb


@pytest.fixture
def console(shared_console: ConsoleProcess, router: ScriptedRouter) -> ConsoleProcess:
    return shared_console


class RawTab:
    """A tab without a page."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []
        self.call = 0

    def tell(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"t": kind, **fields}))

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Returns the reply to a call."""
        self.call += 1
        self.tell(kind, call=self.call, **fields)
        return self.until(lambda each: each["t"] == "reply" and each["call"] == self.call)

    def next(self, timeout_s: float = 20) -> dict[str, Any]:
        self.seen.append(json.loads(self.socket.recv(timeout=timeout_s)))
        return self.seen[-1]

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while not wanted(message := self.next()):
            pass
        return message

    def follow(self, answer: str, version: int = 0) -> list[dict[str, Any]]:
        """The frames of an answer to its end."""
        self.tell("watch", answer=answer, version=version)
        frames: list[dict[str, Any]] = []
        rest = True
        while rest or frames[-1]["status"] in ("waiting", "streaming", "stopping"):
            frames.append(self.until(lambda each: each["t"] == "answer" and each["id"] == answer))
            last = frames[-1]
            if not last.get("more"):
                rest = bool(last["open"][1] if "open" in last else rest) or bool(last.get("tail"))
        return frames


@pytest.fixture
def open_tab(console: ConsoleProcess) -> Iterator[Callable[[], RawTab]]:
    cookie = logged_in(console)
    with ExitStack() as stack:

        def open_one() -> RawTab:
            origin = f"http://127.0.0.1:{console.port}"
            made = connect(socket_url(console), origin=origin, additional_headers={"Cookie": cookie}, max_size=None)  # type: ignore[arg-type]
            tab = RawTab(stack.enter_context(made))
            assert tab.next()["t"] == "welcome"
            return tab

        yield open_one


def metrics_of(console: ConsoleProcess) -> dict[str, float]:
    page = urllib.request.urlopen(console.metrics_url, timeout=10).read().decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("ryzanstein_console")]
    return {name: float(value) for name, _, value in lines}


def test_one_reader_serves_many_tabs(open_tab: Callable[[], RawTab], script: Script, console: ConsoleProcess) -> None:
    script.pieces["go"] = [("node-0", f"{number} ") for number in range(50)]
    script.step_s = 0.01
    tabs = [open_tab() for _ in range(4)]
    answer = tabs[0].ask("ask", text="go")["answer"]
    for tab in tabs:
        last = tab.follow(answer)[-1]
        assert (last["status"], last["tokens"]) == ("complete", 50)
    assert len(script.asked) == 1
    told = metrics_of(console)
    assert told['ryzanstein_console_answers_total{outcome="complete"}'] >= 1
    assert told["ryzanstein_console_sockets"] == 4


def test_a_tab_that_comes_back_gets_the_rest(open_tab: Callable[[], RawTab], script: Script) -> None:
    script.pieces["go"] = [("node-0", f"paragraph {number}\n\n") for number in range(60)]
    script.step_s = 0.02
    first = open_tab()
    answer = first.ask("ask", text="go")["answer"]
    first.tell("watch", answer=answer, version=0)
    half = first.until(lambda each: each["t"] == "answer" and each.get("tokens", 0) >= 20 and each.get("blocks"))
    blocks = sum(len(each.get("blocks", [])) for each in first.seen if each["t"] == "answer")
    first.socket.close()
    rest = open_tab().follow(answer, half["version"])
    assert blocks + sum(len(each.get("blocks", [])) for each in rest) == 60


def test_settings_reach_the_cluster(open_tab: Callable[[], RawTab], script: Script) -> None:
    reply = open_tab().ask("ask", text="hi", sampling={"model": "m", "max_tokens": 5, "temperature": 0.5})
    assert reply["session"].startswith("console-")
    (asked,) = script.asked
    assert (asked.model, asked.sampling.max_tokens, asked.sampling.temperature) == ("m", 5, 0.5)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("{", "truncated"),
        ('{"t": "unknown"}', "unknown"),
        ('{"t": "ask", "text": ""}', "question"),
        ('{"t": "ask", "results": [{"id": "", "name": "a", "content": ""}]}', "results"),
        ('{"t": "ask", "text": "a", "sampling": {"tool_choice": "some"}}', "tool_choice"),
        ('{"t": "ask", "text": "a", "sampling": {"temperature": 3}}', "temperature"),
        ('{"t": "ask", "text": "a", "sampling": {"max_tokens": 0}}', "max_tokens"),
        ('{"t": "ask", "text": "a", "other": 1}', "other"),
        ('{"t": "open", "session": ""}', "session"),
        ('{"t": "watch", "answer": "a", "version": -1}', "version"),
        ("[" * 5000, ""),
    ],
)
def test_a_message_that_is_none_is_answered_with_what_is_wrong(
    open_tab: Callable[[], RawTab], message: str, named: str
) -> None:
    tab = open_tab()
    tab.socket.send(message)
    assert named in tab.until(lambda each: each["t"] == "reply")["error"]
    assert tab.ask("models").get("error", "") == ""


def test_a_message_that_is_too_large_ends_the_socket(open_tab: Callable[[], RawTab]) -> None:
    tab = open_tab()
    tab.socket.send(json.dumps({"t": "ask", "text": "x" * MOST_BYTES}))
    with pytest.raises(ConnectionClosed):
        tab.until(lambda each: False)
    assert tab.socket.close_code == 1009


def test_there_are_not_more_sockets_than_the_bound(open_tab: Callable[[], RawTab], console: ConsoleProcess) -> None:
    tabs = [open_tab() for _ in range(MOST_SOCKETS)]
    with pytest.raises(ConnectionClosed) as refusal:
        open_tab()
    assert refusal.value.rcvd is not None
    assert refusal.value.rcvd.code == 4429
    tabs[0].socket.close()
    time.sleep(0.3)
    assert open_tab().ask("models").get("error", "") == ""
    assert metrics_of(console)['ryzanstein_console_refusals_total{reason="sockets"}'] == 1


def test_a_tab_that_reads_nothing_slows_no_other(
    open_tab: Callable[[], RawTab], script: Script, console: ConsoleProcess
) -> None:
    script.pieces["go"] = [("node-0", f"{number} " + "word " * 800 + "\n\n") for number in range(1500)]
    slow, quick = open_tab(), open_tab()
    answer = quick.ask("ask", text="go")["answer"]
    slow.tell("watch", answer=answer, version=0)
    frames = quick.follow(answer)
    assert sum(len(each.get("blocks", [])) for each in frames) >= 500
    late = slow.follow(answer)
    assert late[-1]["status"] == frames[-1]["status"]


def test_stop_is_confirmed_by_the_cluster(open_tab: Callable[[], RawTab], script: Script) -> None:
    script.pieces["go"] = [("node-0", f"{number} ") for number in range(1000)]
    script.step_s = 0.02
    tab = open_tab()
    answer = tab.ask("ask", text="go")["answer"]
    tab.tell("watch", answer=answer, version=0)
    tab.until(lambda each: each["t"] == "answer" and each.get("tokens", 0) > 5)
    assert tab.ask("stop", answer=answer).get("error", "") == ""
    assert tab.until(lambda each: each["t"] == "answer" and each["status"] in ("stopped", "complete"))["status"] == "stopped"
    assert len(script.cancelled) == 1


def test_retry_asks_again_in_a_copy_without_the_answer(
    open_tab: Callable[[], RawTab], script: Script, router: ScriptedRouter
) -> None:
    tab = open_tab()
    first = tab.ask("ask", text="one")
    tab.follow(first["answer"])
    second = tab.ask("ask", text="two", session=first["session"])
    tab.follow(second["answer"])
    third = tab.ask("retry", session=first["session"])
    tab.follow(third["answer"])
    assert third["session"] != first["session"]
    assert [message.content for message in router.sessions[third["session"]].messages] == ["one", "one", "two", "two"]
    assert len(script.asked) == 3


def test_sessions_are_listed_opened_and_deleted(open_tab: Callable[[], RawTab], router: ScriptedRouter) -> None:
    tab = open_tab()
    asked = tab.ask("ask", text="what is it?")
    tab.follow(asked["answer"])
    tab.ask("sessions")
    (row,) = next(each for each in reversed(tab.seen) if each["t"] == "sessions")["sessions"]
    assert (row["session"], row["title"], row["running"]) == (asked["session"], "what is it?", False)
    tab.ask("open", session=asked["session"])
    turns = [each for each in tab.seen if each["t"] == "turn"]
    shown = [(each.get("question", ""), each.get("answer", "")) for each in turns]
    assert shown == [("what is it?", ""), ("", asked["answer"])]
    assert "no such session" in tab.ask("open", session="nobody")["error"]
    assert tab.ask("delete", session=asked["session"]).get("error", "") == ""
    assert router.sessions == {}


def test_a_question_in_one_tab_appears_in_another_that_shows_its_session(open_tab: Callable[[], RawTab]) -> None:
    one, two = open_tab(), open_tab()
    session = one.ask("ask", text="first")["session"]
    two.ask("open", session=session)
    two.seen.clear()
    answer = one.ask("ask", text="second", session=session)["answer"]
    assert two.until(lambda each: each["t"] == "turn")["question"] == "second"
    assert two.until(lambda each: each["t"] == "turn")["answer"] == answer


def test_there_are_not_more_answers_at_once_than_the_bound(open_tab: Callable[[], RawTab], script: Script) -> None:
    script.step_s = 1.5
    tab = open_tab()
    errors = [tab.ask("ask", text="a b").get("error", "") for _ in range(MOST_RUNNING + 1)]
    assert errors[:-1] == [""] * MOST_RUNNING
    assert "stop one first" in errors[-1]
    time.sleep(4)  # for the tests behind this one


def test_a_long_conversation_is_shown_as_far_as_the_bound_and_says_so(
    open_tab: Callable[[], RawTab], router: ScriptedRouter
) -> None:
    session = router.sessions.setdefault("long", pb.Session(session_id="long"))
    for number in range(500):
        session.messages.add(role=pb.ROLE_USER, content=f"question {number}")
        session.messages.add(role=pb.ROLE_ASSISTANT, content="word " * 1200 + "\n\n")
    tab = open_tab()
    assert tab.ask("open", session="long").get("error", "") == ""
    turns = [each for each in tab.seen if each["t"] == "turn"]
    assert len(turns) == 400
    assert turns[0]["question"] == "question 300"
    assert "up to a million characters" in next(each for each in tab.seen if each["t"] == "opened")["note"]
    router.sessions["huge"] = pb.Session(session_id="huge")
    router.sessions["huge"].messages.add(role=pb.ROLE_ASSISTANT, content="**a** `b`\n\n" * 30_000)
    assert tab.ask("open", session="huge").get("error", "") == ""
    assert tab.ask("models").get("error", "") == ""


def test_logging_out_closes_the_tabs_of_this_login_alone(console: ConsoleProcess, open_tab: Callable[[], RawTab]) -> None:
    other, cookie = open_tab(), logged_in(console)
    origin = f"http://127.0.0.1:{console.port}"
    with connect(socket_url(console), origin=origin, additional_headers={"Cookie": cookie}) as socket:  # type: ignore[arg-type]
        socket.recv(timeout=20)
        assert Answer(console, "POST", "/logout", Cookie=cookie).status == 204
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=20)
        assert socket.close_code == 4401
    assert other.ask("models").get("error", "") == ""


def test_sigterm_ends_it_in_order(router: ScriptedRouter, script: Script, start_console: Callable[..., ConsoleProcess]) -> None:
    console = start_console(router.address)
    script.step_s = 1
    headers = {"Cookie": logged_in(console)}
    with connect(socket_url(console), origin=console.url[:-1], additional_headers=headers) as socket:  # type: ignore[arg-type]
        RawTab(socket).ask("ask", text="a b c d e f")
        began = time.monotonic()
        assert console.stop() == 0
        assert time.monotonic() - began < 10
    assert script.cancelled == set(), "the cluster goes on"
    errors = [line for line in console.log.read_text().splitlines() if '"level": "error"' in line]
    assert errors == []
