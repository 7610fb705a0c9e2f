"""Log lines are JSON with the bound ids and bounded fields."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from ryzanstein.observe.log_files import LineWriter
from ryzanstein.observe.lost_lines import LineLoss, LostLines

PROGRAM = """
import structlog
from ryzanstein.observe import log
log.setup("router", "info", node_id="node-3")
logger = structlog.get_logger()
logger.debug("not shown")
with structlog.contextvars.bound_contextvars(request_id="r1", attempt=2):
    logger.info("call", long="x" * 10_000)
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed")
"""


def test_each_line_is_json_with_service_ids_and_bounded_fields() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=30)
    call, failed = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.stdout == ""
    assert (call["service"], call["node_id"], call["request_id"], call["attempt"]) == ("router", "node-3", "r1", 2)
    assert (call["event"], call["level"], len(call["long"])) == ("call", "info", 4096)
    assert "ZeroDivisionError" in failed["exception"]
    assert "request_id" not in failed


def test_a_header_that_is_no_text_is_reported_without_a_stack() -> None:
    """As gRPC logs it; any other error of a library keeps its own."""
    program = """
import logging
from ryzanstein.observe import log
log.setup("router")
for fails in (lambda: b"\\xff".decode(), lambda: 1 / 0):
    try:
        fails()
    except Exception:
        logging.getLogger("grpc._cython.cygrpc").exception("failed on %s", "x")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    header, other = [json.loads(line) for line in done.stderr.splitlines()]
    assert (header["event"], header["logger"], header["level"]) == ("failed on x", "grpc._cython.cygrpc", "error")
    assert "exception" not in header
    assert "ZeroDivisionError" in other["exception"]


def test_what_a_garbage_collection_logs_while_a_line_is_written_comes_after_it() -> None:
    """The collector may run at any allocation. With a lock that is not the thread's own the process would stand still."""
    program = """
import gc, warnings, structlog
from ryzanstein.observe import log
log.setup("router")
warnings.simplefilter("always")
left = 200
class Ended:
    def __init__(self):
        self.itself = self
    def __del__(self):
        global left
        if left:
            left -= 1
            Ended()  # for the next collection
            warnings.warn("never awaited", RuntimeWarning)
Ended()
gc.set_threshold(1)
for number in range(100):
    structlog.get_logger().info("call", number=number)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["number"] for event in events if event["event"] == "call"] == list(range(100))
    assert sum("never awaited" in event["event"] for event in events) == 200


def test_what_cannot_be_written_is_lost_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open("/dev/full", "wb", buffering=0) as disk, path.open("wb", buffering=0) as freed:
        counted = LostLines()
        write = partial(os.write, disk.fileno())
        lines = LineWriter(write, {"service": "router"}, counted.counter(LineLoss.UNWRITTEN))
        for _ in range(3):
            lines.put(b"{}\n")
        os.dup2(freed.fileno(), disk.fileno())
        lines.put(b'{"event": "after"}\n')
        lines.put(b'{"event": "later"}\n')
    assert counted.by_cause() == {"unwritten": 3, "limited": 0}
    lost, after, later = map(json.loads, path.read_text().splitlines())
    assert (lost["service"], lost["event"], after["event"], later["event"]) == ("router", "log lines lost: 3", "after", "later")


def test_a_line_that_is_torn_ends_before_the_next_one() -> None:
    source, pipe = os.pipe()
    os.set_blocking(pipe, False)
    lines = LineWriter(partial(os.write, pipe), {})
    lines.put(b"x" * 2**20 + b"\n")
    read = os.read(source, 2**20)
    lines.put(b'{"event": "after"}\n')
    torn, *records = (read + os.read(source, 2**20)).decode().splitlines()
    assert torn == "x" * len(torn)
    assert [json.loads(record)["event"] for record in records] == ["log lines lost: 1", "after"]


def test_a_full_disk_ends_no_service() -> None:
    """Neither its own lines do, nor those of libraries, which a process of ours writes."""
    program = """
import os, time, structlog
from ryzanstein.observe import log
log.setup_service("router")
for _ in range(3):
    structlog.get_logger().info("ours")
    os.write(2, b"of a library\\n")
    time.sleep(0.1)
"""
    with open("/dev/full", "wb") as disk:
        done = subprocess.run([sys.executable, "-c", program], stderr=disk, timeout=30, check=False)
    assert done.returncode == 0
