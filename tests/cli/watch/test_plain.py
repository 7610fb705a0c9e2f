"""A watch without a screen: a line for each change."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.watch.plain import ObservedChange, PlainWatch, changes, facts_of, still_told
from ryzanstein.cluster import Node, NodeState
from ryzanstein.survey.views import ClusterStatus

START = [str(Path(sys.executable).with_name("ryzanstein")), "status", "--watch"]


def lines(*samples: ClusterStatus) -> list[list[str]]:
    """What each sample prints, without the time."""
    facts: dict[tuple[str, str, str], str] = {}
    printed = []
    for status in samples:
        after = facts_of(status)
        after |= still_told(facts, after, status)
        printed.append([change.line.removeprefix("T  ") for change in changes(facts, after, "T")])
        facts = after
    return printed


def test_the_first_sample_is_told_whole_and_then_only_what_changes(scene: Any) -> None:
    calm = scene.cluster(scene.node("node-0"))
    first, second, third = lines(
        calm, scene.cluster(scene.node("node-0", 5)), scene.cluster(scene.node("node-0", drained=True))
    )
    assert "service orchestrator: answers" in first
    assert "node node-0 state: READY" in first
    assert "model demo ready nodes: 1" in first
    assert "link node-0: up" in first
    assert second == [], "what changes with each request is no change"
    assert third == ["node node-0 state: READY -> READY (drains)"] + [
        line for line in third if line.startswith("problem no node is ready")
    ]


def test_a_silent_node_is_told_once_and_nothing_of_it_is_over(scene: Any) -> None:
    whole, silent = scene.cluster(scene.node("node-0")), scene.cluster(scene.node("node-0", error="UNAVAILABLE: refused"))
    _, gone, still, back = lines(whole, silent, silent, whole)
    assert "node node-0 state: READY -> no answer" in gone
    assert "problem node-0 does not answer: UNAVAILABLE: refused" in gone
    assert not [line for line in gone if "restarts" in line]
    assert still == []
    assert "node node-0 state: no answer -> READY" in back
    assert "problem node-0 does not answer: UNAVAILABLE: refused: over" in back


def test_what_a_dead_router_told_is_not_over(scene: Any) -> None:
    node = scene.node("node-0")
    _, dead = lines(scene.cluster(node), scene.cluster(node, errors={"router": "UNAVAILABLE"}))
    assert dead == ["service router: answers -> no answer", "problem router does not answer: UNAVAILABLE"]


def test_a_node_that_left_is_gone(scene: Any) -> None:
    _, left = lines(scene.cluster(scene.node("node-0"), scene.node("node-1")), scene.cluster(scene.node("node-0")))
    assert "node node-1 state: READY -> gone" in left
    assert "link node-1: up -> gone" in left


def test_how_long_a_problem_lasts_is_no_change(scene: Any) -> None:
    def standing(seconds: float) -> ClusterStatus:
        node = scene.node("node-0")
        rank = type(node.ranks[0])(0, 1, "all_reduce", 7, seconds, 0.01, 1)
        return scene.cluster(type(node)(node.node, (rank,)))  # type: ignore[no-any-return]

    first, second = lines(standing(1.5), standing(2.5))
    assert "problem node-0 rank 0 has not moved for some time, in all_reduce" in first
    assert second == []


def test_a_change_is_one_line_and_one_document() -> None:
    change = ObservedChange("2030-01-31T12:00:00.000Z", "node", "node-0", "state", "READY", "FAILED")
    assert change.line == "2030-01-31T12:00:00.000Z  node node-0 state: READY -> FAILED"
    assert json.loads(change.document) == {
        "time": "2030-01-31T12:00:00.000Z",
        "kind": "node",
        "name": "node-0",
        "what": "state",
        "before": "READY",
        "after": "FAILED",
    }


def test_names_of_others_take_one_line_and_steer_nothing(scene: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\nnode node-0 state: READY [red]x[/]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ryzanstein.cli.watch.plain._unread", lambda: False)
        PlainWatch(as_json=False).take(scene.cluster(scene.node(hostile, error=hostile)), scene.NOW)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "[red]x[/]" in printed
    stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  \w")
    assert all(stamp.match(line) for line in printed.splitlines())


def test_a_watch_remembers_what_a_silent_service_told(
    scene: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ryzanstein.cli.watch.plain._unread", lambda: False)
    watch, node = PlainWatch(as_json=False), scene.node("node-0")
    watch.take(scene.cluster(node), scene.NOW)
    capsys.readouterr()
    watch.take(scene.cluster(node, errors={"router": "UNAVAILABLE"}), scene.NOW + 1)
    assert "link" not in capsys.readouterr().out
    watch.take(scene.cluster(node), scene.NOW + 2)
    told = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told == ["service router: no answer -> answers", "problem router does not answer: UNAVAILABLE: over"]


def started(orchestrator: Any, *more: str, **variables: str) -> subprocess.Popen[str]:
    command = [*START, "--interval", "0.25", "--orchestrator", orchestrator.address, "--router", "127.0.0.1:1", *more]
    environment = {**os.environ, **variables}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def read_until(process: subprocess.Popen[str], part: str) -> list[str]:
    assert process.stdout is not None
    found: list[str] = []
    while not found or part not in found[-1]:
        line = process.stdout.readline()
        assert line, (found, process.stderr and process.stderr.read())
        found.append(line.rstrip("\n"))
    return found


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pipe_gets_a_line_a_change_until_a_signal(orchestrator: Any, number: signal.Signals) -> None:
    orchestrator.add(member_of("node-0"))
    with started(orchestrator) as process:
        read_until(process, "node node-0 state")
        orchestrator.add(member_of("node-1"))
        read_until(process, "node node-1 state")
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.long
def test_json_is_one_document_a_line(orchestrator: Any) -> None:
    orchestrator.add(member_of("node-0"))
    with started(orchestrator, "--json") as process:
        documents = [json.loads(line) for line in read_until(process, '"node-0", "what": "state"')]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert {tuple(each) for each in documents} == {("time", "kind", "name", "what", "before", "after")}
    assert documents[-1]["after"] == "no answer"


@pytest.mark.long
def test_a_reader_that_leaves_ends_it_also_when_nothing_changes(orchestrator: Any) -> None:
    orchestrator.add(member_of("node-0"))
    process = started(orchestrator)
    read_until(process, "node node-0 state")
    time.sleep(1.0)  # whatever the first sample has still to say
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def member_of(node_id: str) -> Any:
    return Node(node_id, "", state=NodeState.READY, model="demo")
