"""Tables of `ryzanstein status` in terminals of every width: every name is there in full, no line is wider than the place."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from ryzanstein.cli.fitted_table import FittedTable
from ryzanstein.cli.status.command import show
from ryzanstein.cli.status.status_tables import (
    engine_table,
    link_table,
    loss_table,
    model_table,
    node_table,
    protection_table,
    rank_table,
    session_table,
)
from ryzanstein.cluster import Load, Node, NodeState
from ryzanstein.survey.views import (
    ClusterStatus,
    LinkLossView,
    LinkView,
    ModelView,
    NodeStatus,
    RankLossView,
    RankView,
    RouterView,
    SessionView,
)

NODES = [f"ryzanstein-worker-{number}.ryzanstein-worker.ns.svc" for number in (0, 1, 10, 11)]
SESSIONS = [f"a-session-of-a-customer-with-a-long-name-{number}" for number in range(3)]
WIDTHS = (60, 80, 120, 200)
NOW = time.time()
BUSY = Load(running=64, waiting=128, capacity=64, kv_blocks_used=99_999, kv_blocks_total=100_000)
WHY = "UNAVAILABLE: failed to connect to all addresses; last error: Connection refused"
LOST = RankLossView(NOW, 1, "RANK_STALLED", "rank 1 waits in all_reduce for rank 0, which has not moved for 2.0 s")


def node(name: str) -> NodeStatus:
    state = NodeState.DRAINING if name == NODES[0] else NodeState.READY
    described = Node(name, f"{name}:50061", tp=2, state=state, model="demo", load=BUSY, drain_requested=True, beat_time=NOW)
    ranks = tuple(RankView(rank, 4_000_000 + rank, "all_reduce", 10**6, 1.5, 0.025, 2**34) for rank in (0, 1))
    return NodeStatus(described, ranks, 3, WHY if name == NODES[1] else "", "", (LOST,))


VIEW = ClusterStatus(
    tuple(map(node, NODES)),
    RouterView(
        "ryzanstein-router-7c9d8f6b5-x2x4z",
        tuple(LinkView(name, f"{name}:50061", True, "silence", "half_open", 12, NodeState.READY, "") for name in NODES),
        tuple(LinkLossView(NOW, name, "silence", 4) for name in NODES),
    ),
    (ModelView("meta-llama-3.1-70b-instruct-quantized-int8", 131_072, 4),),
    tuple(SessionView(session, NODES[0], NOW) for session in SESSIONS),
)


def visible(width: int, view: ClusterStatus = VIEW) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console, view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table by the title of its first two columns, cells that fold put together again."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("┃"):
            rows = found.setdefault(" ".join(part.strip() for part in line.split("┃")[1:3]), [])
        elif line.startswith("│"):
            cells = [cell.strip() for cell in line.split("│")[1:-1]]
            # In each table some column never folds: where one is empty, a row goes on.
            if rows and "" in cells:
                rows[-1] = [before + cell for before, cell in zip(rows[-1], cells, strict=True)]
            else:
                rows.append(cells)
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_no_table_is_wider_than_its_place(width: int) -> None:
    framed = [line for line in visible(width).splitlines() if re.match("[┏┃┡│└]", line)]
    assert len(framed) > 20
    assert max(map(cell_len, framed)) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_every_name_is_there_in_full_at_every_width(width: int) -> None:
    by_title = tables(visible(width))
    assert [row[0] for row in by_title["node state"]] == NODES
    assert [row[0] for row in by_title["node rank"]] == [name for name in NODES for _ in range(2)]
    link = next(rows for title, rows in by_title.items() if title in ("node address", "node link"))
    assert [row[0] for row in link] == NODES
    session = next(rows for title, rows in by_title.items() if title.startswith("session"))
    assert [row[0] for row in session] == SESSIONS


@pytest.mark.parametrize(
    "made", [node_table, rank_table, engine_table, link_table, loss_table, model_table, session_table, protection_table]
)
def test_where_a_row_begins_is_seen_however_narrow_the_place(made: Callable[[ClusterStatus], FittedTable]) -> None:
    assert any(not column.folds and not column.leaves for column in made(VIEW).columns)


@pytest.mark.parametrize("width", WIDTHS)
def test_states_and_causes_are_never_cut(width: int) -> None:
    text = visible(width)
    assert "…" not in text
    for word in ("DRAINING (drains)", "RANK_STALLED", "silence"):
        assert f" {word} " in text


def test_what_is_left_out_is_said_and_a_wide_place_has_all_columns() -> None:
    narrow, wide = visible(60), visible(200)
    assert "not shown here: " in narrow
    assert "KV blocks" in " ".join(narrow.split("not shown here: ")[1].split())
    assert "not shown here" not in wide
    for title in ("model", "tp", "running", "waiting", "KV blocks", "restarts", "beat", "address", "memory", "details"):
        assert f" {title} " in wide


def test_what_is_not_known_is_a_dash_and_no_number() -> None:
    unknown = NodeStatus(Node("node-0", "10.0.0.1:50061", tp=0, state=NodeState.READY))
    console = Console(file=io.StringIO(), width=160)
    console.print(node_table(ClusterStatus((unknown,))))
    assert isinstance(console.file, io.StringIO)
    (row,) = tables(console.file.getvalue())["node state"]
    assert row == ["node-0", "READY", *["-"] * 7, "0", *["-"] * 3]


def test_a_table_without_rows_is_not_shown() -> None:
    assert "sessions" not in visible(120, ClusterStatus((node("node-0"),)))
