import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from ryzanstein.worker.ranks.group import GroupBounds
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.native import NativeEngines
from ryzanstein.worker.supervision.group import GroupEvents, LossCause
from ryzanstein.worker.supervision.recovery import RecoveryPolicy, Rung
from ryzanstein.worker.supervision.supervisor import Supervisor
from ryzanstein.worker.supervision.watchdog import StallBounds

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
        self.recoveries = []
        self.autopsies = []
        self.failures = []

    def on_ready(self, group, ranks):
        self.ready.put_nowait(group)

    def on_lost(self, loss, recovery):
        self.losses.append(loss)
        self.recoveries.append(recovery)
        self.lost.put_nowait(loss)

    def on_examined(self, autopsy):
        self.autopsies.append(autopsy)

    def on_ended(self):
        pass

    def on_failed(self, reason):
        self.failures.append(reason)

    async def next_group(self):
        return await asyncio.wait_for(self.ready.get(), 20)


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def supervisors():
    return []


@pytest.fixture
async def supervise(listener, supervisors):
    """Starts a supervisor of ranks without a model; ends it with the test."""
    tasks = []

    def start(model: str, policy: RecoveryPolicy, bounds: GroupBounds = BOUNDS) -> asyncio.Task:
        events = GroupEvents(lambda step: None, lambda trace: None, lambda: False)
        engines = NativeEngines(RankSpec(model, 2), bounds, events, command=ECHO)
        supervisors.append(Supervisor(engines, policy, listener))
        tasks.append(asyncio.create_task(supervisors[-1].run()))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_lost_ranks_are_replaced_by_new_processes(listener, supervise):
    supervise("echo", RecoveryPolicy())
    first = await listener.next_group()
    pids = [progress.pid for progress in first.progress()]
    os.kill(pids[1], signal.SIGKILL)
    second = await listener.next_group()
    assert second is not first
    assert [(loss.rank, loss.cause) for loss in listener.losses] == [(1, LossCause.DIED)]
    assert set(pids).isdisjoint(progress.pid for progress in second.progress())
    assert not any(map(exists, pids))


async def test_lost_ranks_are_examined_after_the_loss_is_reported_and_before_they_end(listener, supervise):
    supervise("echo", RecoveryPolicy())
    pids = [progress.pid for progress in (await listener.next_group()).progress()]
    listener.on_examined = lambda autopsy: seen.append((autopsy, len(listener.losses), exists(pids[0])))
    seen = []
    os.kill(pids[1], signal.SIGSTOP)
    await listener.next_group()
    ((autopsy, num_losses, alive),) = seen
    assert (num_losses, alive) == (1, True)
    assert autopsy.loss == listener.losses[0]
    assert [len(autopsy.ranks), [process.name for process in autopsy.processes]] == [2, ["rank 0", "rank 1"]]
    asked, stopped = (process.threads[0] for process in autopsy.processes)
    assert "echo_rank.py" in asked.stack
    assert (stopped.state, stopped.stack) == ("T", "")


async def test_the_end_of_lost_ranks_is_reported_once_no_process_is_left(listener, supervise):
    supervise("echo", RecoveryPolicy())
    pids = [progress.pid for progress in (await listener.next_group()).progress()]
    listener.on_lost = lambda loss, recovery: seen_alive.append([pid for pid in pids if exists(pid)])
    listener.on_ended = lambda: seen_ended.append([pid for pid in pids if exists(pid)])
    seen_alive, seen_ended = [], []
    os.kill(pids[1], signal.SIGKILL)
    await listener.next_group()
    assert seen_alive[0], "the loss is reported while a rank still runs"
    assert seen_ended == [[]]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_lost_ranks_are_replaced_from_the_same_server(listener, supervise):
    supervise("echo", RecoveryPolicy())
    servers = []
    for _ in range(3):
        group = await listener.next_group()
        first, second = (progress.pid for progress in group.progress())
        assert parent(first) == parent(second)
        servers.append(parent(first))
        os.kill(first, signal.SIGKILL)
    assert len(set(servers)) == 1


async def test_a_lost_server_is_named_and_replaced(listener, supervise, running):
    supervise("echo", RecoveryPolicy())
    group = await listener.next_group()
    pids = [progress.pid for progress in group.progress()]
    server = parent(pids[0])
    os.kill(server, signal.SIGKILL)
    successor = await listener.next_group()
    assert [(loss.rank, loss.cause) for loss in listener.losses] == [(0, LossCause.DIED)]
    assert listener.losses[0].message == "the fork server died of SIGKILL, and every rank with it"
    assert not any(map(running, [server, *pids]))
    assert parent(successor.progress()[0].pid) != server


async def test_a_server_that_stands_still_costs_one_start(listener, supervise, running):
    supervise("echo", RecoveryPolicy(), GroupBounds(start_s=2.0, watch_interval_s=0.05))
    group = await listener.next_group()
    pids = [progress.pid for progress in group.progress()]
    server = parent(pids[0])
    os.kill(server, signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    successor = await listener.next_group()
    assert [loss.cause for loss in listener.losses] == [LossCause.DIED, LossCause.START]
    assert listener.losses[0].message.startswith("rank 1 was killed"), "nobody says by what"
    assert listener.losses[1].message == "rank 0 was not forked within 2 s"
    assert not any(map(running, [server, *pids]))
    assert parent(successor.progress()[0].pid) != server


async def test_a_crash_loop_leads_to_quarantine_and_goes_on_slowly(listener, supervise):
    supervise("crash", RecoveryPolicy(first_s=0.01, crash_limit=3, quarantine_s=0.1))
    for _ in range(5):
        await asyncio.wait_for(listener.lost.get(), 20)
    rungs = [recovery.rung for recovery in listener.recoveries[:5]]
    assert rungs == [Rung.RESTART_RANKS] * 2 + [Rung.QUARANTINE] * 3
    assert "3 crashes in a row" in listener.recoveries[2].reason
    assert "exited with code 1" in listener.recoveries[2].reason


async def test_ranks_that_no_quarantine_cures_wait_for_an_operator(listener, supervise, supervisors):
    supervise("crash", RecoveryPolicy(first_s=0.01, crash_limit=1, quarantine_s=0.01, quarantine_limit=1))
    for _ in range(2):
        await asyncio.wait_for(listener.lost.get(), 20)
    assert listener.recoveries[-1].rung is Rung.DRAIN
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(listener.lost.get(), 0.5)
    supervisors[0].revive()
    await asyncio.wait_for(listener.lost.get(), 20)
    assert listener.recoveries[-1].rung is Rung.QUARANTINE


async def test_a_refused_model_is_not_tried_again(listener, supervise):
    task = supervise("refuse", RecoveryPolicy())
    await asyncio.wait_for(task, 20)
    assert listener.failures == ["tensor lm_head.weight is missing"]
    assert listener.losses == []


async def test_cancelling_leaves_no_rank_and_no_server(listener, supervise):
    task = supervise("echo", RecoveryPolicy())
    group = await listener.next_group()
    pids = [progress.pid for progress in group.progress()]
    pids.append(parent(pids[0]))
    task.cancel()
    await asyncio.wait([task])
    assert not any(map(exists, pids))
