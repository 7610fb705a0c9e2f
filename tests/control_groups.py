"""Control groups for tests, where this user may make them: version 1, one hierarchy for each controller."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_TOP = Path("/sys/fs/cgroup")
_FILES = {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes"}
PERIOD_US = 100_000


@contextmanager
def limited(*, cores: float | None = None, memory_bytes: int | None = None) -> Iterator[list[str]]:
    """Makes groups with limits, and groups without limits in these; yields the words that run a command in the latter.

    Skips the test where that is not possible.
    """
    limits = {"cpu": None if cores is None else int(cores * PERIOD_US), "memory": memory_bytes}
    if not all((_TOP / controller / "tasks").exists() for controller in _FILES):
        pytest.skip("there are no control groups of version 1 here")
    groups: list[Path] = []
    name = f"test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        for controller, limit in limits.items():
            if limit is not None:
                outer = _TOP / controller / name
                (outer / "inner").mkdir(parents=True)
                groups += [outer / "inner", outer]
                (outer / _FILES[controller]).write_text(str(limit))
    except OSError as error:
        _remove(groups)
        pytest.skip(f"control groups of version 1 cannot be made here: {error}")
    inner = " ".join(f"{group}/cgroup.procs" for group in groups if group.name == "inner")
    try:
        yield ["/bin/sh", "-c", f'for group in {inner}; do echo $$ > "$group"; done; exec "$@"', "sh"]
    finally:
        _remove(groups)


def _remove(groups: list[Path]) -> None:
    for group in groups:
        group.rmdir()
