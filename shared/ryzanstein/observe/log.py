"""JSON logs on standard error, one event per line, with the request's ids if they are known.

Bind with `structlog.contextvars.bound_contextvars(request_id=..., generation_id=..., attempt=...,
node_id=..., rank=...)`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import warnings
from collections.abc import Mapping
from functools import partial

import structlog
from google.protobuf.message import DecodeError

from ryzanstein.observe import native_lines
from ryzanstein.observe.log_files import LineWriter, Rotation
from ryzanstein.observe.lost_lines import LOST_LINES, LostLines

MAX_FIELD_CHARS = 4096


def _bounded(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Truncates long fields: a prompt in an error message would make a field unbounded."""
    return {
        key: value[:MAX_FIELD_CHARS] if isinstance(value, str) and len(value) > MAX_FIELD_CHARS else value
        for key, value in event.items()
    }


class _Lines:
    """What structlog writes the rendered lines with. Its own loggers lock, and a finalizer that logs would wait for itself."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, line: str) -> None:
        self._writer.put(line.encode(errors="backslashreplace") + b"\n")

    debug = info = warning = error = critical = msg


class _ToStructlog(logging.Handler):
    """A handler that turns the standard library's log records, and warnings, into lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # gRPC logs these for a header that is not UTF-8 and a response that is not a message: the
        # stack is its own.
        stack = None if isinstance(error, UnicodeDecodeError | DecodeError) else error
        structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name, exc_info=stack)


def setup_service(service: str, level: str = "info", rotation: Rotation | None = None, **bound: str | int) -> None:
    """Sets up the log of a service. Call it once in `__main__`, before there are threads.

    From then on, whatever the process and its children write to standard output and error becomes
    JSON too, including the output of a crash. `rotation`: when a file that this goes to is continued in
    another one. `LOST_LINES` counts those that are lost.
    """
    try:
        lost = LostLines()
        LOST_LINES.set(lost)
        log_file = native_lines.divert({"service": service, **bound}, lost, rotation or Rotation())
    except OSError as error:
        setup(service, level, **bound)
        structlog.get_logger(__name__).warning("library output not captured", error=str(error))
        return
    _configure({"service": service, **bound}, level, log_file)
    faulthandler.enable()


def setup(service: str, level: str = "info", **bound: str | int) -> None:
    """Sets up logging to standard error. `bound` (node_id, rank) is on all lines of the process."""
    _configure({"service": service, **bound}, level, LineWriter(partial(os.write, 2), {"service": service, **bound}))


def _configure(fixed: Mapping[str, str | int], level: str, log_file: LineWriter) -> None:
    lines = _Lines(log_file)

    def add_fixed(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**fixed, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            add_fixed,
            _bounded,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_ToStructlog()], level=logging.WARNING)
    logging.captureWarnings(True)
    # gRPC's, of each stream that is refused before its first message is read.
    warnings.filterwarnings("ignore", r"coroutine '_MessageReceiver\.", RuntimeWarning)
