"""Faults of pages that cannot be made strike nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ryzanstein.lab.chaos.faults.pages import FAULTS
from ryzanstein.lab.chaos.stage.stage import LaboratoryError


async def test_a_node_without_pages_on_disk_is_not_killed(tmp_path: Path) -> None:
    killed: list[str] = []
    cluster = SimpleNamespace(services={"node-0": None}, kill=killed.append)
    stage: Any = SimpleNamespace(cluster=cluster, plan=SimpleNamespace(pages=tmp_path))
    victim: Any = SimpleNamespace(node_id="node-0")
    (fault,) = (fault for fault in FAULTS if fault.name == "pages_damaged")
    with pytest.raises(LaboratoryError, match="no pages on disk"):
        async with fault.strike(stage, victim):
            raise AssertionError("it struck")
    assert killed == []
