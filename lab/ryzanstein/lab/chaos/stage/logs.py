"""What services logged since a moment.

The logs are JSON lines with wall-clock times, as `ryzanstein.observe.log` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ryzanstein.observe.log_files import older


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log line.

    `at` is in seconds since the epoch; `service` is the process's name, such as node-1.
    """

    at: float
    service: str
    level: str
    event: str
    fields: Mapping[str, Any]


class LogReader:
    """Reads each service's file from where it stopped. Lines that are not JSON are dropped."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._offsets = dict.fromkeys(paths, 0)
        self._files: dict[str, int | None] = dict.fromkeys(paths)  # inodes: a log is continued in new files

    def skip(self) -> None:
        """Skips what was written until now."""
        for name, path in self._paths.items():
            status = path.stat() if path.exists() else None
            self._offsets[name] = status.st_size if status else 0
            self._files[name] = status.st_ino if status else None

    def read(self) -> list[LogLine]:
        """Returns the complete lines since the last call, in order of time."""
        lines = [line for name in self._paths for line in self._read(name)]
        return sorted(lines, key=lambda line: line.at)

    def _read(self, name: str) -> Iterable[LogLine]:
        path = self._paths[name]
        before = Path(older(str(path), 1))
        if not path.exists():
            return
        if self._files[name] not in (None, path.stat().st_ino):
            if before.exists() and before.stat().st_ino == self._files[name]:
                yield from self._rest(name, before)
            self._offsets[name] = 0
        self._files[name] = path.stat().st_ino
        yield from self._rest(name, path)

    def _rest(self, name: str, path: Path) -> Iterable[LogLine]:
        with path.open("rb") as file:
            file.seek(self._offsets[name])
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offsets[name] += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            if (parsed := parse(name, line)) is not None:
                yield parsed


def parse(service: str, line: str) -> LogLine | None:
    """Returns a line, or None if it is not one of ours."""
    try:
        fields = json.loads(line)
        at = datetime.fromisoformat(fields["timestamp"]).timestamp()
        return LogLine(at, service, str(fields.get("level", "")), str(fields["event"]), fields)
    except (ValueError, KeyError, TypeError):
        return None
