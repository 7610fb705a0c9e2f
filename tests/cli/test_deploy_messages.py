"""`ryzanstein deploy` against an orchestrator that follows a script."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ryzanstein.cli.main import build
from ryzanstein.cluster import Deployment, ModelReport, Node, NodeState, RolloutLimits
from ryzanstein.v1 import orchestrator_pb2

OLD = ModelReport("new", "/models/old", 1, NodeState.READY)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def deploy(orchestrator: Any, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["deploy", *arguments, "--orchestrator", orchestrator.address], env={"COLUMNS": "200"})
    return done.exit_code, done.stderr or done.stdout


def test_the_options_are_in_the_request(orchestrator: Any, model: str) -> None:
    orchestrator.revision = 3
    code, message = deploy(orchestrator, model, "--nodes", "2", "--idle-unload", "1.5", "--reload", "--no-wait")
    assert code == 0, message
    assert orchestrator.deployed == [(Deployment("new", model, 2, 3, 1.5), True)]
    assert "older" not in message


def test_bounds_of_nodes_and_of_the_change_are_in_the_request(orchestrator: Any, model: str) -> None:
    orchestrator.revision = 3
    options = ["--min-nodes", "1", "--max-nodes", "4", "--max-unavailable", "0", "--min-ready", "5", "--progress", "60"]
    code, message = deploy(orchestrator, model, "--nodes", "2", *options, "--max-failed", "0.5", "--allow-outage", "--no-wait")
    assert code == 0, message
    limits = RolloutLimits(0.0, 5.0, 60.0, 0.5, allow_outage=True)
    expected = Deployment("new", model, 2, 3, min_replicas=1, max_replicas=4, rollout=limits)
    assert orchestrator.deployed == [(expected, False)]
    assert "older" not in message
    listed = json.loads(deploy(orchestrator, "--list", "--json")[1])["deployments"][0]
    assert (listed["min_nodes"], listed["max_nodes"], listed["halted"]) == (1, 4, False)
    assert listed["rollout"] == asdict(limits)
    orchestrator.status = {"waits_for": "2 of 3 nodes failed with it", "halted": True}
    table = deploy(orchestrator, "--list")[1]
    assert "2 (min 1, max 4)" in table
    assert "halted: 2 of 3" in " ".join(table.split())


def test_a_rollback_asks_for_the_name_alone_and_says_where_it_leads(orchestrator: Any) -> None:
    orchestrator.revision, orchestrator.earlier_path = 4, "/models/before"
    code, message = deploy(orchestrator, "m", "--rollback", "--no-wait")
    assert code == 0, message
    assert "rolling back 'm' to /models/before" in message
    assert [each.model for each, _ in orchestrator.deployed] == ["m"]
    code, message = deploy(orchestrator, "m", "--rollback", "--nodes", "3")
    assert (code, "has no meaning with --rollback" in message) == (2, True)


@pytest.mark.parametrize("older", [("--min-nodes", "1"), ("--max-failed", "0.1")])
def test_an_orchestrator_that_knows_no_bounds_is_said_to_ignore_them(
    orchestrator: Any, model: str, older: tuple[str, ...]
) -> None:
    orchestrator.revision, orchestrator.knows_bounds = 3, False
    assert "it ignores the bounds" in deploy(orchestrator, model, *older, "--no-wait")[1]
    assert "it ignores" not in deploy(orchestrator, model, "--allow-outage", "--no-wait")[1]


@pytest.mark.parametrize("option", [("--reload",), ("--idle-unload", "5")])
def test_an_older_orchestrator_is_said_to_ignore_what_it_does_not_know(
    orchestrator: Any, model: str, option: tuple[str, ...]
) -> None:
    code, message = deploy(orchestrator, model, *option, "--no-wait")
    assert code == 0, message
    assert "the orchestrator is an older one: it ignores --reload and --idle-unload" in message


@pytest.mark.parametrize("earlier_path", ["", "/models/old"])
def test_a_refused_version_is_exit_code_1_and_the_way_back_is_no_removal(
    orchestrator: Any, model: str, earlier_path: str
) -> None:
    shortage = orchestrator_pb2.NodeShortage(node_id="node-0", reason="no such file")
    orchestrator.revision, orchestrator.nodes = 2, [Node("node-0", "", models=(OLD,), memory_bytes=1)]
    orchestrator.earlier_path = earlier_path
    orchestrator.status = {"assigned_nodes": ["node-0"], "outdated_nodes": ["node-0"], "shortages": [shortage]}
    code, message = deploy(orchestrator, model, "--wait", "20")
    assert code == 1
    _, line, last = message.splitlines()
    assert line == "node-0 refused it and goes on with the earlier version: no such file"
    assert last == (
        f"'new' is not ready: 0 of 1 node; {line}; repair it and deploy it with --reload"
        + (", or return to the earlier directory with --rollback" if earlier_path else "")
    )


def test_the_list_has_revisions_outdated_nodes_and_shortages(orchestrator: Any, model: str) -> None:
    orchestrator.revision = 2
    deploy(orchestrator, model, "--no-wait")
    shortage = orchestrator_pb2.NodeShortage(node_id="node-1", missing_bytes=5, reason="too large")
    orchestrator.status = {"assigned_nodes": ["node-0"], "outdated_nodes": ["node-0"], "shortages": [shortage]}
    code, message = deploy(orchestrator, "--list", "--json")
    assert code == 0
    for part in ('"revision": 2', '"idle_unload_s": 0.0', '"missing_bytes": 5', '"reason": "too large"', '"node_id": "node-1"'):
        assert part in message
    lacks = orchestrator_pb2.NodeShortage(node_id="node-2", missing_bytes=5 * 2**30, reason="needs 9.0 GiB")
    stuck = orchestrator_pb2.NodeShortage(node_id="node-1", reason="failed lately: its start showed no progress for 600 s")
    orchestrator.status["shortages"] = [stuck, lacks]
    table = deploy(orchestrator, "--list")[1]
    assert "outdated nodes" in table
    assert table.splitlines()[-1] == f"'new': {stuck.node_id}: {stuck.reason}, node-2 lacks 5.0 GiB"
