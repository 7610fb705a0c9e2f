"""`ryzanstein bench control` as a user runs it, small: a real orchestrator, a real router, ten nodes that only seem to be."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.lab, pytest.mark.cluster, pytest.mark.timeout(400)]

PHASES = ["join", "idle", "busy", "changes", "leave", "return", "orchestrator killed", "half silent", "half back"]
NODES = 10


async def bench(*options: str) -> tuple[int | None, str]:
    command = (str(Path(sys.executable).parent / "ryzanstein"), "bench", "control", *options)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, complained = await asyncio.wait_for(process.communicate(), 380)
    return process.returncode, complained.decode()


async def test_every_phase_of_a_small_cluster_converges_and_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    options = ("--nodes", str(NODES), "--routers", "1", "--models", "2", "--seconds", "3", "--silence", "6")
    code, complained = await bench(*options, "--json", str(path))
    assert code == 0, complained
    document = json.loads(path.read_text())
    rows: dict[str, Any] = {row["phase"]: row for row in document["rows"]}
    assert list(rows) == PHASES
    assert document["failed"] == []
    assert {(row["nodes"], row["models"], row["real_routers"], row["watchers"]) for row in rows.values()} == {(NODES, 2, 1, 1)}
    assert [name for name, row in rows.items() if row["converged_s"] is None] == ["idle", "busy"]
    for row in rows.values():
        processes = {each["process"]: each for each in row["processes"]}
        assert set(processes) == {"orchestrator", "router-0", "nodes-0", "nodes-1", "watchers"}
        assert min(each["rss_bytes"] for each in processes.values()) > 2**20
        assert min(each["descriptors"] for each in processes.values()) > 3
        assert processes["orchestrator"]["received_messages"] > 0
        assert min(processes[name]["report_late_max_s"] for name in ("nodes-0", "nodes-1", "watchers")) >= 0
    of = {name: {each["process"]: each for each in row["processes"]} for name, row in rows.items()}
    # A router hears of every model of every node, and much more often of those that work.
    assert of["busy"]["router-0"]["received_messages"] > 2 * of["idle"]["router-0"]["received_messages"] > 2 * 2 * NODES
    assert rows["busy"]["tokens_per_s"] > 0
    assert rows["busy"]["stream_problems"] == {}
    assert rows["leave"]["nodes_left"] == 1
    assert rows["changes"]["changes"] > 0
    assert of["half silent"]["orchestrator"]["departures"] == NODES // 2


async def test_wrong_numbers_are_refused_by_name() -> None:
    code, complained = await bench("--nodes", "1")
    assert code == 2
    assert "--nodes" in complained


async def test_what_it_started_ends_with_it() -> None:
    command = (str(Path(sys.executable).parent / "ryzanstein"), "bench", "control", "--nodes", "2", "--routers", "1")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    assert b"join" in await asyncio.wait_for(process.stderr.readline(), 120)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 5
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 128 + signal.SIGTERM
    assert [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
