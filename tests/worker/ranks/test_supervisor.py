import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from ryzanstein.worker.ranks.group import GroupBounds, GroupEvents, LossCause
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.supervisor import Backoff, Supervisor
from ryzanstein.worker.ranks.watchdog import StallBounds

pytestmark = pytest.mark.distributed

ECHO = (sys.executable, str(Path(__file__).with_name("echo_rank.py")))
BOUNDS = GroupBounds(start_s=20, watch_interval_s=0.05, stall=StallBounds(min_s=0.5))


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.ready: asyncio.Queue = asyncio.Queue()
        self.losses = []
        self.lost: asyncio.Queue = asyncio.Queue()
        self.failures = []

    def on_ready(self, group, ranks):
        self.ready.put_nowait(group)

    def on_lost(self, loss):
        self.losses.append(loss)
        self.lost.put_nowait(loss)

    def on_failed(self, reason):
        self.failures.append(reason)

    async def next_group(self):
        return await asyncio.wait_for(self.ready.get(), 20)


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
async def supervise(listener):
    """Starts a supervisor of ranks without a model; ends it with the test."""
    tasks = []

    def start(model: str, backoff: Backoff) -> asyncio.Task:
        events = GroupEvents(lambda step: None, lambda trace: None, lambda: False)
        supervisor = Supervisor(RankSpec(model, 2), BOUNDS, backoff, listener, events, command=ECHO)
        tasks.append(asyncio.create_task(supervisor.run()))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_lost_ranks_are_replaced_by_new_processes(listener, supervise):
    supervise("echo", Backoff())
    first = await listener.next_group()
    pids = [progress.pid for progress in first.progress()]
    os.kill(pids[1], signal.SIGKILL)
    second = await listener.next_group()
    assert second is not first
    assert [(loss.rank, loss.cause) for loss in listener.losses] == [(1, LossCause.DIED)]
    assert set(pids).isdisjoint(progress.pid for progress in second.progress())
    assert not any(map(exists, pids))


async def test_a_crash_loop_counts_as_failed_and_goes_on_slowly(listener, supervise):
    supervise("crash", Backoff(first_s=0.01, longest_s=0.2, crash_limit=3))
    for _ in range(5):
        await asyncio.wait_for(listener.lost.get(), 20)
    assert len(listener.failures) >= 2
    assert "3 crashes in a row" in listener.failures[0]
    assert "exited with code 1" in listener.failures[0]


async def test_a_refused_model_is_not_tried_again(listener, supervise):
    task = supervise("refuse", Backoff())
    await asyncio.wait_for(task, 20)
    assert listener.failures == ["tensor lm_head.weight is missing"]
    assert listener.losses == []


async def test_cancelling_leaves_no_rank(listener, supervise):
    task = supervise("echo", Backoff())
    group = await listener.next_group()
    pids = [progress.pid for progress in group.progress()]
    task.cancel()
    await asyncio.wait([task])
    assert not any(map(exists, pids))


def test_the_first_restart_comes_at_once_and_later_ones_wait_longer():
    backoff = Backoff(first_s=0.25, longest_s=30.0, crash_limit=5)
    assert [backoff.delay_s(crashes) for crashes in range(7)] == [0.0, 0.0, 0.25, 0.5, 1.0, 30.0, 30.0]
