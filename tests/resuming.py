"""A plugin of pytest for runs that take long: `-p tests.resuming --resume FILE` continues after a stop.

The file has the tests that passed, a line each, and what they passed on: the commit and the changes
to it. A run on the same leaves them out. On anything else the file is begun anew.
"""

from __future__ import annotations

import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_PASSED = pytest.StashKey[list[str]]()


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", type=Path, help="file of the tests that passed on this commit: they are not run again")


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.option.resume
    if path is None:
        config.stash[_PASSED] = []
    elif hasattr(config, "workerinput"):  # one of several processes: the first one reads and writes the file
        config.stash[_PASSED] = config.workerinput["passed"]
    else:
        state, lines = _state(), path.read_text().splitlines() if path.exists() else []
        if lines[:1] != [state]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{state}\n")
            lines = []
        config.stash[_PASSED] = lines[1:]
        config.pluginmanager.register(_Recorder(path, continues=bool(lines[1:])))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["passed"] = node.config.stash[_PASSED]


@pytest.hookimpl
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = set(config.stash[_PASSED])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


class _Recorder:
    """Adds a test to the file when all its phases have passed."""

    def __init__(self, path: Path, *, continues: bool) -> None:
        self._path, self._continues = path, continues
        self._passed: set[str] = set()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._passed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._continues:
            session.exitstatus = pytest.ExitCode.OK  # nothing was left to run


def _state() -> str:
    """What the tests run on: the commit, and a digest of what differs from it."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(("git", *arguments), cwd=_ROOT, stdout=subprocess.PIPE, check=True).stdout

    return f"{git('rev-parse', 'HEAD').decode().strip()} {sha256(git('diff', 'HEAD')).hexdigest()[:16]}"
