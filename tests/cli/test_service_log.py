"""What a service said last is found in its log, and in the file before it."""

from __future__ import annotations

import json
from pathlib import Path

from ryzanstein.cli.processes.service_log import ServiceLog


def test_the_last_lines_go_on_in_the_file_before(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "a.log")
    assert log.tail(3) == []
    (tmp_path / "a.log.1").write_text("1\n2\n3\n")
    assert log.tail(2) == ["2", "3"]  # just renamed: the new file is not there yet
    log.path.write_text("4\n")
    assert log.tail(2) == ["3", "4"]
    assert log.tail(9) == ["1", "2", "3", "4"]
    log.path.write_text("".join(f"{number}\n" for number in range(100_000)))
    assert log.tail(2) == ["99998", "99999"]


def test_a_refusal_is_the_last_that_a_service_says(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "a.log")
    assert log.refusal() is None
    refused = json.dumps({"event": "cannot serve", "error": "/m: no config.json"})
    log.path.write_text(f"{refused}\n")
    assert log.refusal() == "/m: no config.json"
    complaint = json.dumps({"event": "Exception ignored in: <function Server.__del__>", "logger": "native"})
    log.path.write_text(f"{refused}\n" + f"{complaint}\n" * 20)
    assert log.refusal() == "/m: no config.json"
    for later in ("Traceback", "[1]", '{"event": "stopped"}'):
        log.path.write_text(f"{refused}\n{later}\n")
        assert log.refusal() is None
