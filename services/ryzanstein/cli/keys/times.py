"""When a key ends, as people write it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from types import MappingProxyType

import typer

_SPAN = re.compile(r"(\d{1,6})([dhm])")
_SECONDS = MappingProxyType({"d": 86_400, "h": 3600, "m": 60})
_LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


def end_of(text: str | None, now: float) -> float | None:
    """Returns when a key ends; None: never. Raises BadParameter for what is no time to come."""
    if text is None:
        return None
    if span := _SPAN.fullmatch(text):
        end = now + int(span[1]) * _SECONDS[span[2]]
    else:
        try:
            read = datetime.fromisoformat(text)
        except ValueError:
            raise typer.BadParameter(
                "must be a span such as 90d or 12h, or a date such as 2030-01-31", param_hint="--expires"
            ) from None
        end = (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).timestamp()
    if not now < end < _LATEST:
        raise typer.BadParameter("must be a time to come", param_hint="--expires")
    return float(int(end))
