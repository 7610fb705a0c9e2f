"""What the views of a watch show of a cluster, and what they remember of services that are silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ryzanstein.cli.watch.board import WatchBoard
from ryzanstein.cli.watch.rows import VIEWS, clock
from ryzanstein.cluster import NodeState
from ryzanstein.survey.views import ClusterStatus, NodeStatus, RouterMember


def board(*samples: tuple[float, ClusterStatus]) -> WatchBoard:
    made = WatchBoard("a cluster")
    for at, status in samples:
        made.take(status, at)
    return made


def seen(made: WatchBoard, view: str, now: float, width: int = 120) -> list[str]:
    """The rows of a view, with one blank between cells."""
    assert made.choose(view)
    shown = made.shown(width, now)
    assert shown is not None
    return [" ".join(line.text.split()) for line in shown.lines]


def test_each_view_shows_its_rows(scene: Any) -> None:
    now = scene.NOW
    node = replace(
        scene.node("node-0", 3, beat_time=now, restarts=2, waiting=1),
        recent_losses=(scene.rank_loss(now - 60, 1, "RANK_STALLED", "rank 1 stood still"),),
    )
    lost = (scene.link_loss(now - 5, "node-1", "silence", 4),)
    made = board((now, scene.cluster(node, lost=lost)))
    assert seen(made, "nodes", now) == ["node-0 READY demo 2 1.0 GiB 1.0 GiB / 8.0 GiB 3/64 1 9/8192 2 ▁ now"]
    assert seen(made, "ranks", now)[0] == "node-0 0 100 idle no 7 10 ms 256 MiB"
    assert seen(made, "models", now) == ["demo 2048 1 3 1 - ▁"]
    assert seen(made, "routers", now) == ["node-0 router-0 127.0.0.1:1006 up - closed 3", "router-0 - - serves - - 3"]
    assert seen(made, "links", now) == seen(made, "4", now)
    assert seen(made, "generations", now) == ["node-0 demo 3/64 1 3 - ▁"]
    assert seen(made, "losses", now) == [
        f"{clock(now - 5)} router-0 link to node-1 silence 4 attempts",
        f"{clock(now - 60)} node-0 rank 1 RANK_STALLED rank 1 stood still",
    ]
    assert seen(made, "problems", now) == ["router-0 has no link to node-1: silence"]


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("view", list(VIEWS))
def test_no_line_of_any_view_is_wider_than_its_place(scene: Any, view: str, width: int) -> None:
    made = board((scene.NOW, scene.cluster(*(scene.node(f"a-node-with-a-long-name-{at}") for at in range(3)))))
    made.choose(view)
    shown = made.shown(width, scene.NOW)
    assert shown is not None
    assert {len(line.text) for line in (shown.head, *shown.lines)} == {width}


def test_a_wide_screen_shows_every_column_and_a_narrow_one_the_important_ones(scene: Any) -> None:
    made = board((scene.NOW, scene.cluster(scene.node("node-0", 3))))
    for view in VIEWS:
        made.choose(view)
        wide = made.shown(120, scene.NOW)
        assert wide is not None
        assert wide.left_out == (), view
    made.choose("nodes")
    narrow = made.shown(60, scene.NOW)
    assert narrow is not None
    assert {"KV blocks", "node memory", "load"} <= set(narrow.left_out)
    assert {"node", "state", "running", "waiting"}.isdisjoint(narrow.left_out)


def test_a_node_that_does_not_answer_stays_with_all_its_ranks_and_their_age(scene: Any) -> None:
    now, other = scene.NOW, scene.node("node-1")
    made = board(
        (now, scene.cluster(scene.node("node-0"), other)),
        (now + 7, scene.cluster(scene.node("node-0", error="UNAVAILABLE: refused"), other)),
    )
    nodes = seen(made, "nodes", now + 7)
    assert nodes[0].startswith("node-0 no answer")
    assert nodes[0].endswith("7 s")
    assert not nodes[1].endswith("7 s")
    assert [line.endswith("7 s") for line in seen(made, "ranks", now + 7)] == [True, True, False, False]
    assert seen(made, "ranks", now + 130)[0].endswith("2 min")


def test_a_node_that_comes_back_is_as_before(scene: Any) -> None:
    now = scene.NOW
    whole, silent = scene.cluster(scene.node("node-0", beat_time=now)), scene.cluster(scene.node("node-0", error="gone"))
    made = board((now, whole))
    before = made.shown(120, now)
    made.take(silent, now + 1)
    assert made.shown(120, now + 1) != before
    made.take(whole, now + 2)
    after = made.shown(120, now + 2)
    assert before is not None
    assert after is not None
    assert [line.text.split() for line in after.lines] == [line.text.split() for line in before.lines]


def test_a_node_that_was_silent_from_the_first_on_is_as_old_as_its_last_beat(scene: Any) -> None:
    now = scene.NOW
    made = board((now, scene.cluster(scene.node("node-0", error="gone", beat_time=now - 40))))
    assert seen(made, "nodes", now)[0].endswith("40 s")


def test_a_node_that_nobody_names_any_more_is_grey_until_it_is_not_missed(scene: Any) -> None:
    now = scene.NOW
    made = board(
        (now, scene.cluster(scene.node("node-0"), scene.node("node-1"))), (now + 5, scene.cluster(scene.node("node-1")))
    )
    assert seen(made, "nodes", now + 5)[0].endswith("5 s")
    made.take(scene.cluster(scene.node("node-1")), now + 901)
    assert [line.split()[0] for line in seen(made, "nodes", now + 901)] == ["node-1"]
    assert [line.split()[0] for line in seen(made, "ranks", now + 901)] == ["node-1", "node-1"]


def test_what_a_dead_router_told_stays_and_nodes_are_not_old(scene: Any) -> None:
    now, node = scene.NOW, scene.node("node-0")
    made = board((now, scene.cluster(node)), (now + 9, scene.cluster(node, errors={"router": "UNAVAILABLE: refused"})))
    for view in ("models", "routers"):
        assert [line.endswith("9 s") for line in seen(made, view, now + 9)] == [True] * len(seen(made, view, now + 9))
        assert seen(made, view, now + 9)
    assert not seen(made, "nodes", now + 9)[0].endswith("9 s")
    assert made.problem_lines(60)[0] == ("router does not answer: UNAVAILABLE: refused", True)


def test_a_model_that_its_router_lists_no_more_is_gone(scene: Any) -> None:
    now, node = scene.NOW, scene.node("node-0")
    made = board((now, scene.cluster(node)), (now + 1, scene.cluster(node, models=())))
    assert seen(made, "models", now + 1) == []


def test_a_row_whose_node_is_well_is_the_same_a_second_later(scene: Any) -> None:
    now = scene.NOW
    made = board((now, scene.cluster(scene.node("node-0", beat_time=now))))
    before = made.shown(120, now)
    made.take(scene.cluster(scene.node("node-0", beat_time=now + 0.6)), now + 1.5)
    assert made.shown(120, now + 1.5) == before


def test_sorting_begins_with_the_largest_number_and_turns_round(scene: Any) -> None:
    made = board((scene.NOW, scene.cluster(scene.node("node-0", 3), scene.node("node-1", 9), scene.node("node-2", 1))))

    def first() -> list[str]:
        return [line.split()[0] for line in seen(made, made.view_name, scene.NOW)]

    assert made.sort("R")
    assert first() == ["node-1", "node-0", "node-2"]
    assert made.sort("R")
    assert first() == ["node-2", "node-0", "node-1"]
    assert made.sort("N")
    assert first() == ["node-0", "node-1", "node-2"]
    assert not made.sort("Z")
    assert first() == ["node-0", "node-1", "node-2"]


def test_problems_are_two_lines_however_many_there_are(scene: Any) -> None:
    made = board((scene.NOW, scene.cluster(*(scene.node(f"node-{at}", state=NodeState.FAILED) for at in range(9)))))
    for width in (60, 120):
        lines = made.problem_lines(width)
        assert len(lines) == 2
        assert max(len(text) for text, _ in lines) <= width
        assert "more: 0)" in lines[1][0]
    made.take(scene.cluster(scene.node("node-0")), scene.NOW)
    assert made.problem_lines(60) == (("no problems", False), ("", False))


def test_the_first_line_says_what_runs_and_how_the_watch_stands(scene: Any) -> None:
    made = WatchBoard("orchestrator 127.0.0.1:1", read_only=True)
    assert made.top(60, 0.0) == "nobody has answered yet: orchestrator 127.0.0.1:1"
    made.take(scene.cluster(scene.node("node-0", 3), scene.node("node-1", drained=True)), scene.NOW)
    assert made.top(120, scene.NOW).startswith("1/2 nodes ready, 3/128 run, 0 wait   read-only  ")
    assert "5 s old" in made.top(120, scene.NOW + 5)
    made.paused, made.filter = True, "node-1"
    assert "PAUSED   read-only   filter: node-1" in made.top(120, scene.NOW + 5)


@pytest.mark.parametrize("hostile", ["[red]x[/]", "\x1b[2Jwiped", "a\nb"])
def test_names_of_others_are_shown_as_they_are_without_what_steers(scene: Any, hostile: str) -> None:
    node: NodeStatus = scene.node(hostile, model=hostile, error=hostile)
    made = board((scene.NOW, scene.cluster(node, errors={"orchestrator": hostile})))
    told = "\n".join([made.top(120, scene.NOW), *(text for text, _ in made.problem_lines(120))])
    for view in VIEWS:
        made.choose(view)
        shown = made.shown(120, scene.NOW)
        assert shown is not None
        told += "".join(line.text for line in shown.lines)
    assert "\x1b" not in told
    assert " ".join(hostile.replace("\x1b", "").split()) in told


def test_every_router_that_is_listed_has_a_row(scene: Any) -> None:
    whole = scene.cluster(scene.node("node-0", 2))
    routers = (
        RouterMember("router-0", "r:1", draining=False),
        RouterMember("router-1", "r:2", draining=True),
    )
    listed = replace(whole, routers=routers)
    rows = seen(board((scene.NOW, listed)), "routers", scene.NOW)
    assert rows[1:] == ["router-0 - r:1 serves - - 2", "router-1 - r:2 draining - - -"]
