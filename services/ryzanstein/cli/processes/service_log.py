"""What a service of a local cluster wrote into its log: the last lines, and why it could not serve."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ryzanstein.observe.log_files import older

_TAIL_BYTES = 16 * 2**10
_REFUSED = "cannot serve"  # the event of `run_service` before exit code 1
_NATIVE = "native"
_LAST_WORDS = 50


class ServiceLog:
    """The log at `path`, which may be continued in a new file at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self, num_lines: int, within_bytes: int = _TAIL_BYTES) -> list[str]:
        """Returns its last lines, those right before a rename included. It reads so many bytes of each file at most."""
        lines = _last_lines(self.path, within_bytes)
        if len(lines) < num_lines:
            lines = _last_lines(Path(older(str(self.path), 1)), within_bytes) + lines
        return lines[-num_lines:]

    def refusal(self) -> str | None:
        """Returns why the service could not serve, if that is the last that it said itself."""
        for line in reversed(self.tail(_LAST_WORDS)):
            try:
                record = json.loads(line)
            except ValueError:
                return None
            if not isinstance(record, dict) or record.get("logger") != _NATIVE:
                refused = isinstance(record, dict) and record.get("event") == _REFUSED
                return str(record.get("error", "")) if refused else None
        return None


def _last_lines(path: Path, num_bytes: int) -> list[str]:
    """Returns whole lines from the end of a file; none if there is no such file."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - num_bytes))
            return log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
