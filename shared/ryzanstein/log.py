"""JSON logs, one event a line on standard error, with the request's ids bound where they are known.

Bind with `structlog.contextvars.bound_contextvars(request_id=..., generation_id=..., attempt=..., node_id=..., rank=...)`.
"""

from __future__ import annotations

import logging
import sys

import structlog

MAX_FIELD_CHARS = 4096


def _bounded(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """No field of a log line may grow without bound: a prompt in an error message would."""
    return {
        key: value[:MAX_FIELD_CHARS] if isinstance(value, str) and len(value) > MAX_FIELD_CHARS else value
        for key, value in event.items()
    }


def setup(service: str, level: str = "info", **bound: str | int) -> None:
    """Call once in `__main__`. `bound` (node_id, rank) stands on every line of the process."""
    fixed = {"service": service, **bound}

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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
