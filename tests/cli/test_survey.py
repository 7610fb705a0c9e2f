"""What `ryzanstein status` finds out about the models of a node, from an orchestrator and nodes that follow a script."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ryzanstein.cli.main import build
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.status.command import as_document
from ryzanstein.cli.status.status_tables import engine_table, node_table
from ryzanstein.cluster import Beat, EngineTraits, ModelReport, Node, NodeState
from ryzanstein.survey.look import look
from ryzanstein.survey.problems import problems
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.survey.views import ClusterStatus

READY, FAILED = NodeState.READY, NodeState.FAILED
GIB = 2**30
DEMO = ModelReport("demo", "/models/demo", 0, READY, memory_bytes=GIB, started_with=True)
SECOND = ModelReport("second", "/models/second", 1, READY, memory_bytes=2 * GIB)
RARE = ModelReport("rare", "/models/rare", 1, READY, memory_bytes=4 * GIB, asleep=True)
BROKEN = ModelReport("broken", "/models/broken", 1, FAILED, reason="no such file")
MEMBER = Node("node-0", "", state=READY, model="demo", models=(DEMO, SECOND, RARE, BROKEN), memory_bytes=8 * GIB)
ONE = Beat(state=READY, model="demo")
BEATS = (
    Beat(state=READY, model="demo", other_models=("second", "rare")),
    Beat(state=READY, model="second"),
    Beat(state=READY, model="rare"),
)


@pytest.fixture
def router() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def rows(view: ClusterStatus) -> dict[str, list[str]]:
    """The cells of each row of the table of nodes, by its first cell."""
    console = Console(file=io.StringIO(), width=240)
    console.print(node_table(view))
    assert isinstance(console.file, io.StringIO)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells if row[0]}


async def test_every_model_of_a_node_is_a_row_with_its_memory(orchestrator: Any, router: str) -> None:
    orchestrator.add(MEMBER, *BEATS)
    view = await look(orchestrator.address, KeyedRouter(router))
    visible = {name: (cells[0], cells[1], cells[3], cells[4]) for name, cells in rows(view).items()}
    assert visible == {
        "node-0": ("READY", "demo", "1.0 GiB", "3.0 GiB / 8.0 GiB"),
        "node-0/second": ("READY", "second", "2.0 GiB", ""),
        "node-0/rare": ("asleep", "rare", "4.0 GiB", ""),
        "node-0/broken": ("FAILED", "broken", "-", ""),
    }
    found = [line for line in problems(view) if line.startswith("node-")]
    assert found == ["node-0/broken is FAILED: no such file"]


async def test_a_node_that_does_not_answer_is_one_problem_and_all_its_models_are_shown(orchestrator: Any, router: str) -> None:
    orchestrator.add(MEMBER)
    view = await look(orchestrator.address, KeyedRouter(router))
    assert {name: cells[0] for name, cells in rows(view).items()} == {
        "node-0": "no answer",
        "node-0/second": "no answer",
        "node-0/rare": "no answer",
        "node-0/broken": "FAILED",
    }
    assert sum(line.startswith("node-0") for line in problems(view)) == 1


async def test_an_engine_that_is_not_the_nodes_own_is_shown_with_what_it_lacks(orchestrator: Any, router: str) -> None:
    engine = EngineTraits("llama.cpp b7200", frozenset({"min_p", "constraint"}), continues_exactly=False)
    orchestrator.add(
        Node("node-0", "", state=READY, model="demo"), Beat(state=READY, model="demo", engine=engine, reserve=True)
    )
    view = await look(orchestrator.address, KeyedRouter(router))
    told = {"name": "llama.cpp b7200", "unsupported": ("constraint", "min_p"), "exact": False, "reserve": True}
    assert as_document(view)["nodes"][0]["engine"] == told
    console = Console(file=io.StringIO(), width=240)
    console.print(engine_table(view))
    assert isinstance(console.file, io.StringIO)
    cells = [cell.strip() for cell in console.file.getvalue().splitlines()[-2].split("│")[1:-1]]
    assert cells == ["node-0", "llama.cpp b7200", "inexactly", "constraint, min_p", "yes"]


async def test_nodes_with_their_own_engine_have_no_table_of_engines(orchestrator: Any, router: str) -> None:
    orchestrator.add(MEMBER, *BEATS)
    assert len(engine_table(await look(orchestrator.address, KeyedRouter(router)))) == 0


async def test_a_version_that_was_refused_is_a_problem(orchestrator: Any, router: str) -> None:
    refused = ModelReport("demo", "/m", 1, READY, next_revision=2, next_state=FAILED, next_reason="no such file")
    orchestrator.add(Node("node-0", "", state=READY, model="demo", models=(refused,), memory_bytes=GIB), ONE)
    found = [line for line in problems(await look(orchestrator.address, KeyedRouter(router))) if line.startswith("node-")]
    assert found == ["node-0 refused a new version of 'demo': no such file"]


async def test_an_older_node_has_no_memory_to_show(orchestrator: Any, router: str) -> None:
    orchestrator.add(Node("node-0", "", state=READY, model="demo"), ONE)
    assert rows(await look(orchestrator.address, KeyedRouter(router)))["node-0"][3:5] == ["-", "-"]


async def test_scripts_get_the_states_of_models_by_name(orchestrator: Any, router: str) -> None:
    orchestrator.add(MEMBER, *BEATS)
    nodes = as_document(await look(orchestrator.address, KeyedRouter(router)))["nodes"]
    assert [each["report"]["state"] for each in nodes] == ["READY", "READY", "READY", "FAILED"]
    assert [report["next_state"] for report in nodes[0]["node"]["models"]] == ["UNSPECIFIED"] * 4


@pytest.mark.parametrize("option", [["--read-only"], ["--interval", "5"]])
def test_what_is_for_a_watch_alone_is_refused_without_one(option: list[str]) -> None:
    result = CliRunner().invoke(build(), ["status", *option])
    assert result.exit_code == 2
    assert f"{option[0]}: is for --watch" in result.output.replace("Invalid value for ", "")
