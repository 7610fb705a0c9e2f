"""The dashboards are what their generator draws, and each query names what exists."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from ryzanstein.lab.sight.__main__ import FOLDER
from ryzanstein.lab.sight.dashboards import DASHBOARDS
from ryzanstein.lab.sight.dashboards.drawing import drawn
from ryzanstein.lab.sight.dashboards.panels import Board

ROOT = FOLDER.parents[2]


def _read(board: Board) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "dashboards" / f"{board.name}.json").read_text())
    return read


def test_there_are_no_other_dashboards() -> None:
    assert {path.stem for path in (FOLDER / "dashboards").iterdir()} == {board.name for board in DASHBOARDS}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_the_files_are_what_is_drawn(board: Board) -> None:
    assert (FOLDER / "dashboards" / f"{board.name}.json").read_text() == drawn(board)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_grafanas_schema_has_every_field(board: Board) -> None:
    """What its types do not know is lost on the way through them."""
    read = _read(board)
    assert Dashboard.from_json(read).to_json().keys() == read.keys()


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_every_query_names_what_exists(board: Board, unknown: Any) -> None:
    expressions = [target["expr"] for panel in _read(board)["panels"] for target in panel.get("targets", ())]
    assert expressions
    found = {each: problems for each in expressions if (problems := unknown(each.replace("$__rate_interval", "5m")))}
    assert found == {}


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_every_variable_is_chosen_by_a_label_that_exists(board: Board, known: dict[str, Any]) -> None:
    for label, metric in board.choices.items():
        assert label in known[metric].labels


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_every_panel_says_what_it_shows_and_where_to_look(board: Board) -> None:
    titles = [panel.title for panel in board.panels]
    assert len(titles) == len(set(titles))
    for panel in board.panels:
        assert panel.about.endswith("."), panel.title
        assert not panel.runbook or (ROOT / "docs" / "operate" / "runbooks" / f"{panel.runbook}.md").exists(), panel.title
