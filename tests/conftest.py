"""For all tests: the real parts that some of them start besides Python (see `make parts`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@pytest.fixture(scope="session")
def part() -> Callable[[str], str]:
    """The path of a program that a test starts. Where it is missing the test is skipped; in CI it fails."""

    def find(name: str) -> str:
        found = shutil.which(name, path=_PATH)
        if found is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed: make parts")
        return found

    return find
