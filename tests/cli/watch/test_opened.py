"""What is opened of a row: its details, and the log of a node of this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.watch.board import WatchBoard
from ryzanstein.cli.watch.opened.details import details
from ryzanstein.cli.watch.opened.local_log import log_lines


def opened(scene: Any, status: Any, view: str, key: str, *, after: Any = None) -> str:
    made = WatchBoard("a cluster")
    made.take(status, scene.NOW)
    if after is not None:
        made.take(after, scene.NOW + 5)
    made.choose(view)
    return "\n".join(details(made, key, scene.NOW + 5, 80))


def test_all_of_a_node_is_told(scene: Any) -> None:
    node = scene.node("node-0", 16)
    lost = (scene.link_loss(scene.NOW - 5, "node-0", "silence", 4), scene.link_loss(scene.NOW - 5, "node-1", "silence", 4))
    told = opened(scene, scene.cluster(node, lost=lost), "nodes", "node-0")
    for part in ("KV blocks    48/8192", "▃ 25%", "at 127.0.0.1:1006: READY", "rank 1: idle, step 7, process 101"):
        assert part in told
    assert "link of router-0 to 127.0.0.1:1006: up, breaker closed, 16 in flight" in told
    assert "link to node-0, seen by router-0: silence, 4 attempts" in told
    assert "link to node-1" not in told


def test_a_rate_is_told_where_tokens_are_counted(scene: Any) -> None:
    node = scene.node("node-0", 16)
    assert "tokens/s" not in opened(scene, scene.cluster(node), "nodes", "node-0")
    made = WatchBoard("a cluster")
    made.take(scene.cluster(scene.counting("node-0", 100)), scene.NOW)
    made.take(scene.cluster(scene.counting("node-0", 350)), scene.NOW + 5)
    lines = details(made, "node-0", scene.NOW + 5, 80)
    assert [line.split()[-1] for line in lines if line.startswith("tokens/s")] == ["50"]


def test_one_that_does_not_answer_says_since_when_and_why(scene: Any) -> None:
    silent = scene.cluster(scene.node("node-0", error="UNAVAILABLE: refused"))
    told = opened(scene, scene.cluster(scene.node("node-0")), "nodes", "node-0", after=silent)
    assert "silent for   5 s" in told
    assert "no answer: UNAVAILABLE: refused" in told


def test_the_stacks_of_a_crash_are_told(scene: Any) -> None:
    loss = scene.rank_loss(scene.NOW, 1, "RANK_EXITED", "rank 1 ended", "Fatal error\n  in step")
    told = opened(scene, scene.cluster(replace(scene.node("node-0"), recent_losses=(loss,))), "nodes", "node-0")
    assert "    Fatal error\n      in step" in told
    assert "rank 1, seen by node-0: RANK_EXITED, rank 1 ended" in told


def test_a_row_that_is_gone_is_said_to_be(scene: Any) -> None:
    assert opened(scene, scene.cluster(), "nodes", "node-9") == "it is not known any more"


def test_names_of_others_do_not_steer_the_terminal(scene: Any) -> None:
    node = replace(scene.node("node-0", error="\x1b[2J"), reason="\x1b]52;c;aGk=\x07")
    assert not set(opened(scene, scene.cluster(node), "nodes", "node-0")) & set("\x1b\x07")


def record(event: str, **more: Any) -> str:
    return json.dumps({"event": event, "timestamp": "2030-01-31T12:00:00Z", "level": "info", **more}) + "\n"


def test_the_log_of_the_node_that_serves_here_is_shown(tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_text(record("serving", grpc_port=7) + record("registered"))
    told = log_lines(tmp_path, "node-0", "127.0.0.1:7")
    assert [line.split("  ")[-1] for line in told] == ["grpc_port=7", "registered"]


def test_a_node_with_tls_is_known_by_its_other_port(tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_text(record("serving", grpc_port=7, tls_port=8))
    assert len(log_lines(tmp_path, "node-0", "localhost:8")) == 1


def test_where_it_began_to_serve_may_be_in_an_older_file(tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_text(record("registered"))
    (tmp_path / "node-0.log.1").write_text(record("serving", grpc_port=7))
    assert len(log_lines(tmp_path, "node-0", "127.0.0.1:7")) == 1


@pytest.mark.parametrize(
    ("node_id", "address"),
    [
        ("node-0", "127.0.0.1:8"),  # a node of this name in another cluster
        ("node-0", "10.0.0.1:7"),
        ("node-0", "nonsense"),
        ("node-1", "127.0.0.1:7"),
        ("", "127.0.0.1:7"),
        ("../node-0", "127.0.0.1:7"),
        ("a\0b", "127.0.0.1:7"),
        ("n" * 5000, "127.0.0.1:7"),
    ],
)
def test_of_any_other_node_the_command_is_shown(tmp_path: Path, node_id: str, address: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (tmp_path, inner):
        (folder / "node-0.log").write_text(record("serving", grpc_port=7))
    told = log_lines(inner, node_id, address)
    assert f"  ryzanstein logs --node {node_id} --state-dir DIR" in told or "cannot be read" in told[0]
    assert log_lines(None, "node-0", "127.0.0.1:7")[0] == "No log is known to be that of node-0."


def test_of_a_long_log_the_end_is_shown(tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_text(
        record("serving", grpc_port=7) + "".join(record(f"line {at}", more="x" * 100) for at in range(5000))
    )
    told = log_lines(tmp_path, "node-0", "127.0.0.1:7")
    assert len(told) == 500
    assert "line 4999" in told[-1]


def test_what_a_library_wrote_into_the_log_does_not_steer_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_text(record("serving", grpc_port=7) + "\x1b[2J\n")
    assert "\x1b" not in "".join(log_lines(tmp_path, "node-0", "127.0.0.1:7"))
