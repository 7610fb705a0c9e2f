"""Whatever a process writes by itself stands in its log as JSON: lines of libraries, of those that it starts, of its crash."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ryzanstein.observe.native_lines import LINES_PER_S, Lines, Records

START = """
import ctypes, logging, os, subprocess, sys, time, warnings
import structlog
from ryzanstein.observe import log
log.setup_service("router", node_id="node-3")
"""


def lines_of(program: str, code: int = 0) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", START + program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False
    )
    assert done.returncode == code, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_lines_of_libraries_become_records() -> None:
    records = lines_of(
        """
structlog.get_logger().info("ours")
os.write(2, b"E0000 00:00:1763848609.84 28917 chttp2_transport.cc:1403] bad \\xff\\n")
os.write(1, b"to standard output")
"""
    )
    assert {record["event"] for record in records} == {
        "ours",
        "E0000 00:00:1763848609.84 28917 chttp2_transport.cc:1403] bad \\xff",
        "to standard output",
    }
    assert {record["service"] for record in records} == {"router"}
    assert {record["node_id"] for record in records} == {"node-3"}
    assert [record["level"] for record in records if record["event"].startswith("E0000")] == ["error"]


def test_a_standard_output_of_its_own_is_left_alone() -> None:
    program = START + 'os.write(1, b"an answer"); os.write(2, b"of a library")'
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"an answer"
    assert json.loads(done.stderr)["event"] == "of a library"


def test_lines_of_processes_that_it_starts_come_through_and_records_stay_as_they_are() -> None:
    program = 'import os; os.write(2, b\'plain\\\\n\'); os.write(2, b\'{\\"event\\": \\"of a rank\\", \\"rank\\": 1}\\\\n\')'
    records = lines_of(f'subprocess.run([sys.executable, "-c", "{program}"])\nif os.fork() == 0: os.write(2, b"forked\\n")')
    assert {"event": "of a rank", "rank": 1} in records
    assert {"plain", "forked"} <= {record["event"] for record in records}


def test_python_logging_warnings_and_tracebacks_are_records() -> None:
    records = lines_of(
        """
logging.getLogger("some.library").warning("of %s", "logging")
warnings.warn("of warnings")
print("printed", file=sys.stderr)
raise ZeroDivisionError
""",
        code=1,
    )
    events = [record["event"] for record in records]
    assert "of logging" in events
    assert any("of warnings" in event for event in events)
    assert any("ZeroDivisionError" in event for event in events)


def test_the_last_words_of_a_crash_are_there() -> None:
    records = lines_of("ctypes.CDLL(None).perror(b'last words')\nctypes.string_at(0)", code=-11)
    events = [record["event"] for record in records]
    assert any(event.startswith("last words") for event in events)
    assert any("Fatal Python error: Segmentation fault" in event for event in events)


def test_who_writes_without_end_is_not_held_up_and_bounded() -> None:
    records = lines_of(
        """
line = b"x" * 99 + b"\\n"
began = time.monotonic()
for _ in range(50_000):
    try: os.write(2, line)
    except BlockingIOError: pass
assert time.monotonic() - began < 20
"""
    )
    seconds = 25
    assert 1 <= len(records) <= seconds * LINES_PER_S


def test_nothing_of_it_outlives_the_process() -> None:
    """Reading to the end of standard error would not return before."""
    assert lines_of("") == []


@pytest.mark.parametrize("pieces", [[b"a\nb\n"], [b"a", b"\n", b"b\n"], [b"\n\na\n", b"b"]])
def test_lines_come_whole_from_pieces(pieces: list[bytes]) -> None:
    seen: list[bytes] = []
    lines = Lines(seen.append)
    for piece in pieces:
        lines.feed(piece)
    lines.end()
    assert seen == [b"a", b"b"]


@pytest.mark.parametrize("line", [b"{", b"[1]", b"{" * 100_000, b"\x00", b"x" * 10**6, b'{"a": 1} trailing'])
def test_what_is_no_record_is_wrapped_and_bounded(line: bytes) -> None:
    written: list[bytes] = []
    lines = Lines(Records({"service": "s"}, written.append).take)
    lines.feed(line + b"\n")
    (record,) = written
    assert json.loads(record)["logger"] == "native"
    assert len(record) < 30_000


def test_lines_over_the_limit_of_a_second_are_counted_in_the_services_metrics() -> None:
    records = lines_of(
        """
from ryzanstein.observe import metrics
registry = metrics.new_registry()
metrics.show_service("router", registry)
def lost(cause):
    return registry.get_sample_value("ryzanstein_router_log_lines_dropped_total", {"cause": cause})
assert (lost("limited"), lost("unwritten")) == (0, 0)
os.write(2, b"".join(b"line %d\\n" % number for number in range(1000)))
until = time.monotonic() + 20
while not lost("limited") and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.2)
structlog.get_logger().info("counted", limited=lost("limited"))
"""
    )
    counted = next(record["limited"] for record in records if record["event"] == "counted")
    kept = sum(record["event"].startswith("line ") for record in records)
    assert counted == 1000 - kept > 0
