"""A rank that hangs while it loads, with a real orchestrator that counts only what moves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.orchestrator.conftest import Serving, serve

from ryzanstein.cluster import Deployment, NodeState

pytestmark = pytest.mark.cluster


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
    return found


def phase(running: Serving) -> str:
    """What the ranks of the deployed model do, as the node reports it."""
    (node,) = running.control.nodes()
    report = node.report("second")
    return "" if report is None or report.progress is None else report.progress.phase


async def beaten(running: Serving, times: int) -> None:
    """Returns when the node has beaten so often."""
    beats = running.telemetry.beats._value
    begun = beats.get()
    await until(lambda: beats.get() >= begun + times)


async def stopped_in_a_phase(running: Serving, rank: int) -> None:
    """Stops a rank after a few milliseconds at a time, until the node has seen it do something."""
    while True:
        os.kill(rank, signal.SIGSTOP)
        await beaten(running, 3)
        if phase(running):
            return
        os.kill(rank, signal.SIGCONT)
        await asyncio.sleep(0.005)


async def test_a_model_whose_rank_hangs_while_it_loads_expires_and_is_ready_when_it_goes_on(
    start_node: Any, second: Path, tmp_path: Path
) -> None:
    beats = {"tuning": {"heartbeat_interval_s": 0.05}}
    async with serve(tmp_path / "o.sqlite", replica_lease_s=1.0, lease_s=1.0, **beats) as running:
        node = start_node("--orchestrator", running.address, tp=1)
        await until(lambda: [each for each in running.control.nodes() if each.state is NodeState.READY])
        before = set(node.rank_pids())
        await running.control.deploy(Deployment("second", str(second), 1))
        (rank,) = await until(lambda: set(node.rank_pids()) - before)
        await stopped_in_a_phase(running, rank)
        (status,) = running.control.deployments()
        assert (status.ready_nodes, status.shortages) == ((), ()), "it was stopped in time"
        (shortage,) = await until(lambda: running.control.deployments()[0].shortages)
        assert (shortage.node_id, shortage.reason) == ("node-t", "failed lately: its start showed no progress for 1 s")
        assert running.telemetry.replicas_expired._value.get() == 1
        os.kill(rank, signal.SIGCONT)
        await until(lambda: running.control.deployments()[0].ready_nodes == ("node-t",))
        assert await until(lambda: not running.control.deployments()[0].shortages)
        assert await until(lambda: not running.control._reconciler._leases._nodes), "it reports no start any more"
