"""Every page of docs/runbooks is lived through: the fault is real, and so is each command and each expression of the page."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(240)]


def test_node_died(world: Any, walk: Any, all_ready: None) -> None:
    with world.load() as load:
        page = walk(world, "node-died", world.variables("node-1"))
        page.run(strike=lambda: world.cluster.kill("node-1"), heal=lambda: world.cluster.restart("node-1"))
    assert load.failures == []
