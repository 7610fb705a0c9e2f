"""A record of a service's log, and which records are wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error", "critical")
_FIRST = ("timestamp", "level", "service", "event", "node_id", "rank", "logger")
_LEAD = "{time}  {level:<8} {who}  {event}"


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A line of the log of `service`. `time` is Unix seconds; a line that is no record has that of the one before it."""

    time: float
    service: str
    line: str
    fields: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Returns it for people: when, how bad, who, what, and all other fields. A stack takes lines of its own."""
        if not self.fields:
            return f"{_moment(self.time)}  {'':<8} {self.service}  {_visible(self.line)}"
        who = self.service if "rank" not in self.fields else f"{self.service} rank {self.fields['rank']}"
        lead = _LEAD.format(
            time=_moment(self.time), level=self.fields.get("level", ""), who=who, event=_visible(str(self.fields.get("event")))
        )
        more = {name: value for name, value in self.fields.items() if name not in _FIRST}
        long = [str(value) for value in more.values() if isinstance(value, str) and "\n" in value]
        short = [f"{name}={_value(value)}" for name, value in more.items() if not (isinstance(value, str) and "\n" in value)]
        return "\n".join(["  ".join([lead, *short]), *("    " + _visible(line) for text in long for line in text.splitlines())])


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records are wanted; an empty value stands for all. `level` is the least, `since` Unix seconds.

    An id of the HTTP API ends with its generation's.
    """

    request: str = ""
    generation: str = ""
    node: str = ""
    rank: int | None = None
    level: str = "debug"
    since: float = 0.0

    def has(self, record: LogRecord) -> bool:
        fields = record.fields
        return (
            record.time >= self.since
            and (not self.request or fields.get("request_id") == self.request)
            and (not self.generation or _is_generation(self.generation, fields.get("generation_id")))
            and (not self.node or self.node in (record.service, fields.get("node_id")))
            and (self.rank is None or fields.get("rank") == self.rank)
            and (self.level == LEVELS[0] or _severity(fields.get("level")) >= LEVELS.index(self.level))
        )


def read_record(service: str, line: str, before: float) -> LogRecord:
    """Returns the record of a line. `before` is the time of the one before it."""
    try:
        fields = json.loads(line)
        return LogRecord(datetime.fromisoformat(fields["timestamp"]).timestamp(), service, line, fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        return LogRecord(before, service, line, {})


def _is_generation(wanted: str, generation_id: object) -> bool:
    return isinstance(generation_id, str) and generation_id != "" and wanted.endswith(generation_id)


def _severity(level: object) -> int:
    return LEVELS.index(level) if level in LEVELS else 0


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%S.%f")[:-3]


def _value(value: object) -> str:
    plain = isinstance(value, str) and value.isprintable() and value and not set(value) & set(' "=')
    return str(value) if plain else json.dumps(value)


def _visible(text: str) -> str:
    """Returns text without what could steer a terminal: a library or a client may have written it."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
