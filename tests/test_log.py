"""Log lines are JSON with the bound ids and bounded fields."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import structlog
from ryzanstein import log
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
from ryzanstein import log
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
