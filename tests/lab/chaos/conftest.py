"""Networks of a laboratory, where this machine allows them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ryzanstein.lab.chaos.machines.network import HostNetwork, NetworkImpossibleError


@pytest.fixture
def network() -> Iterator[HostNetwork]:
    """Skipped, with the reason, where network namespaces are impossible; in CI that is a failure."""
    try:
        with HostNetwork() as opened:
            yield opened
    except NetworkImpossibleError as impossible:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no network namespaces: {impossible}")
