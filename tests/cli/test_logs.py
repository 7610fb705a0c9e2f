"""The logs of a state directory as one: in the order of time, of whom one wants, and whole while files are renamed."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ryzanstein.cli.logs.command import since_of
from ryzanstein.cli.logs.reading import ServiceFiles, followed, merged
from ryzanstein.cli.main import build
from ryzanstein.observe.log_files import LogFile, Rotation

START = 1_900_000_000.0


def line(at_s: float, event: str, **fields: Any) -> str:
    moment = datetime.fromtimestamp(START + at_s, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": event, "level": "info", **fields, "timestamp": moment})


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A router and a node that has lost a rank; the node's log was renamed once."""
    router = [line(0, "serving"), line(2, "call", request_id="r-1", generation_id="g1", level="warning"), line(9, "stopped")]
    (tmp_path / "router-0.log").write_text("\n".join([*router, ""]))
    older = [line(1, "serving", node_id="node-0"), line(3, "accepted", node_id="node-0", request_id="r-1", generation_id="g1")]
    (tmp_path / "node-0.log.1").write_text("\n".join([*older, ""]))
    crash = "Fatal Python error: Segmentation fault\n\n  File a"
    newer = [line(4, "rank's last words", node_id="node-0", rank=1, level="error", stack=crash), "torn", line(5, "ended")]
    (tmp_path / "node-0.log").write_text("\n".join([*newer, ""]))
    return tmp_path


def run(state: Path, *arguments: str) -> list[str]:
    result = CliRunner().invoke(build(), ["logs", "--state-dir", str(state), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def events(lines: list[str]) -> list[str]:
    return [json.loads(each)["event"] if each.startswith("{") else each for each in lines]


def test_all_logs_are_one_in_the_order_of_time(state: Path) -> None:
    found = events(run(state, "--json"))
    assert found == ["serving", "serving", "call", "accepted", "rank's last words", "torn", "ended", "stopped"]


def test_people_see_who_said_what_and_stacks_as_they_are(state: Path) -> None:
    found = run(state, "--rank", "1")
    assert found[0] == "17:46:44.000  error    node-0 rank 1  rank's last words"
    assert found[1] == "    Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(("arguments", "wanted"), [
    (["--request", "r-1"], ["call", "accepted"]),
    (["--generation", "g1"], ["call", "accepted"]),
    (["--generation", "chatcmpl-g1"], ["call", "accepted"]),
    (["--generation", "1"], []),
    (["--node", "node-0"], ["serving", "accepted", "rank's last words", "torn", "ended"]),
    (["--node", "router-0"], ["serving", "call", "stopped"]),
    (["--level", "warning"], ["call", "rank's last words"]),
    (["--since", "2030-03-17T17:46:45"], ["ended", "stopped"]),
])  # fmt: skip
def test_what_is_wanted_is_shown(state: Path, arguments: list[str], wanted: list[str]) -> None:
    assert events(run(state, "--json", *arguments)) == wanted


def test_nothing_in_a_log_steers_a_terminal(state: Path) -> None:
    (state / "router-1.log").write_text(
        line(7, "\x1b[2Jcleared", reason="\x1b]0;title\x07", stack="a\n\x1b[31mred") + "\n\x1b[2J\n"
    )
    found = run(state, "--node", "router-1")
    assert all(each.isprintable() for each in found)
    assert "\\x1b[2Jcleared" in found[0]


def test_a_span_is_back_from_now(state: Path) -> None:
    assert since_of("10m", 1000.0) == 400.0
    result = CliRunner().invoke(build(), ["logs", "--state-dir", str(state), "--since", "soon"])
    assert result.exit_code == 2


def test_without_logs_it_says_where_they_would_be(tmp_path: Path) -> None:
    result = CliRunner().invoke(build(), ["logs", "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "kubectl" in result.stderr


def test_whoever_follows_misses_no_line_while_files_are_renamed(tmp_path: Path) -> None:
    path, num_lines = tmp_path / "node-0.log", 2000
    path.write_text(line(0, "0") + "\n")
    files = [ServiceFiles("node-0", path)]
    assert [record.fields["event"] for record in merged(files)] == ["0"]

    def write() -> None:
        with path.open("ab", buffering=0) as log:
            writer = LogFile(os.dup(log.fileno()), Rotation(60_000, 3))
        for number in range(1, num_lines):
            writer.write((line(number, str(number)) + "\n").encode())
            if number % 50 == 0:
                time.sleep(0.002)
        writer.close()

    writing = threading.Thread(target=write)
    writing.start()
    seen = [record.fields["event"] for record in islice(followed(files), num_lines - 1)]
    writing.join()
    for each in files:
        each.close()
    assert seen == [str(number) for number in range(1, num_lines)]
    assert (tmp_path / "node-0.log.2").exists()
