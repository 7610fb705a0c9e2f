"""A plugin of pytest for runs that end in time: `-p tests.bounded --within SECONDS`; add `--no-loadscope-reorder`.

Tests that have not begun by then are skipped, and the last lines of the run count them. Files come in an order that the commit
decides, so that it is not always the same ones that are left out.
"""

from __future__ import annotations

import subprocess
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

_UNTIL = pytest.StashKey[float]()


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", default=0.0, help="begin no test later than that")


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of several processes: they end together
        config.stash[_UNTIL] = config.workerinput["until"]
    else:
        config.stash[_UNTIL] = time.time() + config.option.within


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["until"] = node.config.stash[_UNTIL]


@pytest.hookimpl
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    command = ("git", "rev-parse", "HEAD")
    commit = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True).stdout
    items.sort(key=lambda item: sha256(commit + str(item.path.name).encode()).digest())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() >= item.config.stash[_UNTIL]:
        pytest.skip("the time of this run was up; `make test-long` runs all")
