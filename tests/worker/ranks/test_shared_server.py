"""Several models on one fork server, with real processes that load no model."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ryzanstein.worker.ranks.group import GroupBounds
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.native import NativeEngines
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.ranks.starting.shared_server import RankServers
from ryzanstein.worker.supervision.group import GroupEvents, LossCause
from ryzanstein.worker.supervision.recovery import RecoveryPolicy
from ryzanstein.worker.supervision.supervisor import Supervisor
from ryzanstein.worker.supervision.watchdog import StallBounds

pytestmark = pytest.mark.distributed

ECHO = (sys.executable, str(Path(__file__).with_name("echo_rank.py")))
BOUNDS = GroupBounds(start_s=20, watch_interval_s=0.05, stall=StallBounds(min_s=0.5))
POLICY = RecoveryPolicy(first_s=0.01)


class SharingModel:
    """A model under a supervisor: its groups, its losses, and where its ranks come from."""

    def __init__(self, servers: RankServers, model: str, *, nice: int = 0, bounds: GroupBounds = BOUNDS) -> None:
        events = GroupEvents(lambda step: None, lambda trace: None, lambda: False)
        spec = RankSpec(model, 2, nice=nice)
        self.engines = NativeEngines(spec, bounds, events, command=ECHO, new_server=servers.lease)
        self.groups: asyncio.Queue = asyncio.Queue()
        self.losses: asyncio.Queue = asyncio.Queue()
        self.group = None
        self.task = asyncio.create_task(Supervisor(self.engines, POLICY, self).run())

    def on_ready(self, group, ranks):
        self.groups.put_nowait(group)

    def on_lost(self, loss, recovery):
        self.losses.put_nowait(loss)

    def on_examined(self, autopsy):
        pass

    def on_ended(self):
        pass

    def on_failed(self, reason):
        raise AssertionError(reason)

    async def ready(self) -> "SharingModel":
        self.group = await asyncio.wait_for(self.groups.get(), 20)
        return self

    async def loss(self):
        return await asyncio.wait_for(self.losses.get(), 20)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.group.progress()]

    @property
    def server(self) -> int:
        (server,) = {parent(pid) for pid in self.pids}
        return server


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started_by(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def open_fds() -> dict[str, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found[link.name] = str(link.readlink())
    return found


class Started(list):
    """The servers that were started, as a `NewRankServer`."""

    def __call__(self, command, env, nice):
        self.append(ForkServer(command, env, nice))
        return self[-1]

    @property
    def alive(self) -> list[int]:
        return [server.pid for server in self if exists(server.pid)]


@pytest.fixture
def started() -> Started:
    return Started()


@pytest.fixture
async def share(started):
    """Starts models on one source of servers; ends all of them with the test, and nothing may be left of them."""
    before = open_fds()
    servers = RankServers(started)
    models = []

    def start(model: str = "echo", **others) -> SharingModel:
        models.append(SharingModel(servers, model, **others))
        return models[-1]

    yield start
    for model in models:
        await model.stop()
    await servers.close()
    assert started.alive == []
    await asyncio.sleep(0.1)  # the readers of life signs close them
    left = {fd: target for fd, target in open_fds().items() if fd not in before}
    assert left == {}


async def test_models_share_one_server_that_is_started_for_the_first(share, started) -> None:
    assert started == []
    first, second = share(), share()
    await first.ready()
    await second.ready()
    assert first.server == second.server == started[0].pid
    assert len(set(first.pids + second.pids)) == 4
    assert len(started) == 1


async def test_a_killed_rank_of_one_model_leaves_the_other_alone(share, started) -> None:
    first, second = await share().ready(), await share().ready()
    pids = second.pids
    os.kill(first.pids[1], signal.SIGKILL)
    assert (await first.loss()).cause is LossCause.DIED
    await first.ready()
    assert second.pids == pids
    assert all(map(exists, pids))
    assert not second.group.lost.done()
    assert first.server == second.server
    assert len(started) == 1


async def test_a_start_that_is_cancelled_while_it_forks_disturbs_nobody(share, started, eventually) -> None:
    first = await share().ready()
    server = started[0]
    os.kill(server.pid, signal.SIGSTOP)
    second, third = share(), share()
    await asyncio.wait([second.task], timeout=0.2)
    await second.stop()
    os.kill(server.pid, signal.SIGCONT)
    await third.ready()
    assert not first.group.lost.done()
    assert first.server == third.server == server.pid

    async def no_stray() -> bool:
        return started_by(server.pid) == {*first.pids, *third.pids}

    await eventually(no_stray, 5)


async def test_a_doubtful_server_is_left_by_one_model_and_kept_by_the_other(share, started) -> None:
    first = await share().ready()
    crashing = share("crash")
    await crashing.loss()
    await crashing.loss()
    await crashing.stop()
    third = await share().ready()
    assert not first.group.lost.done()
    assert first.server == started[0].pid
    assert third.server == started[-1].pid != first.server, "new models get the newest server"
    assert started.alive == [first.server, third.server], "those that only the crashing model had are over"
    await first.stop()
    assert started.alive == [third.server], "the doubtful one ends with its last user"


async def test_a_killed_server_is_replaced_by_one_for_all_its_models(share, started) -> None:
    models = [await share().ready(), await share().ready(), await share().ready()]
    lost = models[0].server
    os.kill(lost, signal.SIGKILL)
    for model in models:
        assert (await model.loss()).message == "the fork server died of SIGKILL, and every rank with it"
        await model.ready()
    assert len(started) == 2
    assert {model.server for model in models} == {started[1].pid}


async def test_a_server_that_stands_still_is_left_for_one_new_server(share, started) -> None:
    bounds = GroupBounds(start_s=2.0, watch_interval_s=0.05)
    models = [await share(bounds=bounds).ready(), await share(bounds=bounds).ready()]
    healthy = await share().ready()
    os.kill(started[0].pid, signal.SIGSTOP)
    for model in models:
        os.kill(model.pids[0], signal.SIGKILL)
    for model in models:
        assert [(await model.loss()).cause, (await model.loss()).cause] == [LossCause.DIED, LossCause.START]
        await model.ready()
    assert {model.server for model in models} == {started[1].pid}
    assert not healthy.group.lost.done()
    assert healthy.server == started[0].pid
    os.kill(started[0].pid, signal.SIGCONT)


async def test_a_model_with_another_niceness_has_another_server(share, started) -> None:
    first, second = await share().ready(), await share(nice=1).ready()
    assert first.server != second.server
    assert len(started) == 2


async def test_a_server_without_models_serves_the_next_one_and_ends_when_nobody_comes(started, eventually) -> None:
    servers = RankServers(started, idle_s=0.3)
    command, env = ECHO, {"A": "1"}
    first = servers.lease(command, env, 0)
    await first.close()
    second = servers.lease(command, env, 0)
    await asyncio.sleep(0.5)
    assert len(started.alive) == len(started) == 1, "used again in time"
    await second.close()

    async def over() -> bool:
        return started.alive == []

    await eventually(over, 5)
    third = servers.lease(command, env, 0)
    assert len(started) == 2
    await third.close()
    await servers.close()
    assert started.alive == []


async def test_a_lost_server_without_models_is_not_leased(started) -> None:
    servers = RankServers(started)
    await servers.lease(ECHO, {}, 0).close()
    os.kill(started[0].pid, signal.SIGKILL)
    await started[0].lost
    lease = servers.lease(ECHO, {}, 0)
    assert len(started) == 2
    assert not lease.lost.done()
    await lease.close()
    await lease.close()  # twice is once
    await servers.close()
