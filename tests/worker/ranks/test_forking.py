"""The fork server and its agent's end, with real processes that load no model."""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ryzanstein.worker.ranks.starting.forking import RANK_COMMAND, ForkFailed, ForkServer, ForkServerLost
from ryzanstein.worker.ranks.starting.process import end

pytestmark = pytest.mark.distributed

OBEDIENT = (sys.executable, str(Path(__file__).with_name("obedient_rank.py")))
STANDARD = {0, 1, 2}


class Rank:
    """A rank, and this side of its channel."""

    def __init__(self, process, channel: socket.socket) -> None:
        self.process, self._channel = process, channel

    def tell(self, word: str) -> None:
        self._channel.send(word.encode())

    def ask(self, word: str) -> bytes:
        self.tell(word)
        return self._channel.recv(4096)

    async def exit_code(self, timeout_s: float = 5.0) -> int:
        return await asyncio.wait_for(asyncio.shield(self.process.exited), timeout_s)


@pytest.fixture
async def server():
    async with ForkServer(OBEDIENT, {}) as server:
        yield server


@pytest.fixture
def fork():
    """Forks a rank that has a channel and more descriptors."""
    channels = []

    async def make(server: ForkServer, rank: int = 0, *more: int) -> Rank:
        ours, theirs = socket.socketpair()
        channels.append(ours)
        ours.settimeout(5)
        with theirs:
            return Rank(await asyncio.wait_for(server.fork(rank, (theirs.fileno(), *more)), 10), ours)

    yield make
    for channel in channels:
        channel.close()


def open_fds(pid: int | str = "self") -> dict[int, str]:
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found[int(link.name)] = str(link.readlink())
    return found


def proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def started_by(pid: int) -> set[int]:
    """Processes whose parent it is."""
    return {int(child) for child in proc(pid, f"task/{pid}/children").split()}


async def test_a_rank_has_its_descriptors_under_the_same_numbers_and_no_others(server, fork) -> None:
    files = [os.memfd_create(f"file-{i}") for i in range(3)]
    # The lowest numbers are the server's own there, the highest come after all that it receives.
    moved = [os.dup2(file, number) for file, number in zip(files, (files[0], 60, 61), strict=True)]
    try:
        for i, number in enumerate(moved):
            os.write(number, f"this is {i}".encode())
        ranks = [await fork(server, 0, *moved), await fork(server, 1, *reversed(moved))]
        for rank in ranks:
            assert [rank.ask(f"read {number}") for number in moved] == [b"this is 0", b"this is 1", b"this is 2"]
            fds = open_fds(rank.process.pid)
            own = {number for number in fds if "lifesign" in fds[number] or "last-words" in fds[number]}
            (channel,) = set(fds) - own - STANDARD - set(moved)
            assert fds[channel].startswith("socket:")
            assert {number: fds[number] for number in moved} == {number: open_fds()[number] for number in moved}
    finally:
        for number in {*files, *moved}:
            os.close(number)


async def test_every_number_of_the_servers_own_can_be_a_ranks(server, fork) -> None:
    await fork(server)
    busy = set(open_fds(server.pid)) - STANDARD
    file = os.memfd_create("wanted")
    os.write(file, b"mine")
    # Numbers that are free here, for the first ranks' sake, and taken there.
    wanted = sorted(busy - set(open_fds()))
    try:
        for number in wanted:
            os.dup2(file, number)
        rank = await fork(server, 1, *wanted, file)
        assert [rank.ask(f"read {number}") for number in (*wanted, file)] == [b"mine"] * (len(wanted) + 1)
    finally:
        for number in (*wanted, file):
            os.close(number)


async def test_ranks_are_the_servers_children_in_groups_of_their_own(server, fork) -> None:
    ranks = [await fork(server, rank) for rank in range(2)]
    for number, rank in enumerate(ranks):
        pid = rank.process.pid
        assert json.loads(rank.ask("rank")) == [number, pid, server.pid, pid]
        assert proc(pid, "comm").strip() == f"rank-{number}"
    assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
    assert started_by(server.pid) == {rank.process.pid for rank in ranks}


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("exit 0", 0),
        ("exit 75", 75),
        ("fail", 1),
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGSEGV, -signal.SIGSEGV),
    ],
)
@pytest.mark.parametrize("server_stopped", [False, True])
async def test_how_a_rank_ended_is_known_also_while_the_server_stands_still(server, fork, word, code, server_stopped) -> None:
    rank = await fork(server)
    if server_stopped:
        os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    rank.tell(word) if isinstance(word, str) else rank.process.send_signal(word)
    assert await rank.exit_code() == code
    assert time.monotonic() - began < 1.0
    assert gone(rank.process.pid) != server_stopped, "who reaps it is the server"
    rank.process.send_signal(signal.SIGKILL)


async def test_a_stopped_rank_is_seen_and_can_be_killed(server, fork, eventually) -> None:
    rank = await fork(server)
    assert not rank.process.stopped
    assert rank.process.resident_bytes > 2**20
    rank.process.send_signal(signal.SIGSTOP)
    await eventually(lambda: asyncio.to_thread(lambda: rank.process.stopped), 5)
    await end([rank.process], grace_s=0.1)
    assert await rank.exit_code() == -signal.SIGKILL
    assert not rank.process.stopped
    assert rank.process.resident_bytes == 0


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_killed_server_takes_its_ranks_along(server, fork, running, stopped) -> None:
    ranks = [await fork(server, rank) for rank in range(2)]
    for rank in ranks:
        rank.ask("rank")
    if stopped:
        os.kill(server.pid, signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    assert await asyncio.wait_for(server.lost, 5) == "the fork server died of SIGKILL"
    assert [await rank.exit_code() for rank in ranks] == [-signal.SIGKILL] * 2
    assert not any(running(rank.process.pid) for rank in ranks)
    with pytest.raises(ForkServerLost, match="died of SIGKILL"):
        await fork(server)


async def test_a_server_that_is_killed_while_it_prepares_forks_nothing(fork) -> None:
    async with ForkServer(OBEDIENT, {"PREPARE": "hang"}) as server:
        forking = asyncio.create_task(fork(server))
        await asyncio.sleep(0.1)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ForkServerLost, match="died of SIGKILL"):
            await forking


async def test_a_server_that_cannot_prepare_says_why(fork) -> None:
    async with ForkServer(OBEDIENT, {"PREPARE": "fail"}) as server:
        with pytest.raises(ForkServerLost, match="the fork server failed: ImportError: no module named torch"):
            await fork(server)


async def test_a_rank_that_cannot_be_forked_is_an_error_of_its_own(server, fork, running) -> None:
    rank = await fork(server)
    rank.ask("rank")
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    before = open_fds(server.pid)
    room_for_one = next(number for number in range(64) if number not in before) + 1
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (room_for_one, limits[1]))
    with pytest.raises(ForkFailed, match="OSError: received 1 of 5 descriptors: too many are open"):
        await fork(server, 1, 1, 2)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    assert open_fds(server.pid) == before
    assert running(rank.process.pid)
    assert json.loads((await fork(server, 1)).ask("rank"))[0] == 1


async def cancelled(call: asyncio.Task) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_cancelled_call_leaves_no_rank_and_the_server_usable(server, fork, eventually) -> None:
    rank = await fork(server)
    rank.ask("rank")
    before, agents = open_fds(server.pid), open_fds()
    os.kill(server.pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        call = asyncio.create_task(server.fork(7, (theirs.fileno(),)))
        await asyncio.wait([call], timeout=0.05)
        await cancelled(call)
    following = asyncio.create_task(fork(server, 1))
    await asyncio.sleep(0.05)
    os.kill(server.pid, signal.SIGCONT)
    successor = await following
    assert successor.process.rank == 1
    assert json.loads(successor.ask("rank"))[:2] == [1, successor.process.pid]

    async def only_two() -> bool:
        return started_by(server.pid) == {rank.process.pid, successor.process.pid}

    await eventually(only_two, 5)
    await end([successor.process], grace_s=0.0)
    assert open_fds(server.pid) == before

    async def closed() -> bool:
        return len(open_fds()) <= len(agents) + 1  # the end of the successor's channel; what earlier tests left may close

    await eventually(closed, 5)


async def test_a_call_that_is_cancelled_in_the_moment_of_its_answer_leaves_no_rank(server, fork, eventually) -> None:
    await fork(server)
    os.kill(server.pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        call = asyncio.create_task(server.fork(7, (theirs.fileno(),)))
        await asyncio.wait([call], timeout=0.05)
        os.kill(server.pid, signal.SIGCONT)
        server._call.answer.add_done_callback(lambda _: call.cancel())
        with pytest.raises(asyncio.CancelledError):
            await call

        async def one() -> bool:
            return len(started_by(server.pid)) == 1

        await eventually(one, 5)  # while the stray's channel is open, which would end it too


async def test_calls_wait_for_each_other_and_one_that_waits_can_be_cancelled(fork) -> None:
    async with ForkServer(OBEDIENT, {}) as server:
        calls = [asyncio.create_task(fork(server, rank)) for rank in range(4)]
        await asyncio.sleep(0)
        await cancelled(calls[2])
        ranks = [await calls[number] for number in (0, 1, 3)]
        assert [json.loads(rank.ask("rank"))[0] for rank in ranks] == [0, 1, 3]
        assert started_by(server.pid) == {rank.process.pid for rank in ranks}


async def test_the_agent_goes_before_its_ranks(fork) -> None:
    async with ForkServer(OBEDIENT, {}, nice=3) as server:
        rank = await fork(server)
        rank.ask("rank")
        for pid, nice in ((server.pid, 0), (rank.process.pid, 3)):
            assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + nice
            assert os.getsid(pid) == server.pid != os.getsid(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.long
async def test_a_rank_is_known_to_be_dying_before_its_memory_is_taken_down(fork, number: signal.Signals) -> None:
    """Its gigabyte is there still. One of three is enough: on a busy machine both may be over before this process runs."""
    before = []
    async with ForkServer(OBEDIENT, {}) as server:
        for place in range(3):
            rank = await fork(server, place)
            rank.ask("hold 1000000000")
            assert not rank.process.dying.done()
            os.kill(rank.process.pid, number)
            await asyncio.wait_for(rank.process.dying, 5)
            before.append(not rank.process.over.done())
            assert await rank.exit_code() == -number
    assert any(before)


async def test_an_end_of_its_own_is_no_dying(fork) -> None:
    async with ForkServer(OBEDIENT, {}) as server:
        rank = await fork(server)
        rank.tell("exit 7")
        assert await rank.exit_code() == 7
        assert not rank.process.dying.done()


async def test_threads_before_a_fork_are_reported(fork) -> None:
    with capture_logs() as lines:
        async with ForkServer(OBEDIENT, {"PREPARE": "thread"}) as server:
            await fork(server, 0)
            await fork(server, 1)
    assert [(line["event"], line["threads"]) for line in lines] == [("fork server has threads", 2)]


async def test_the_server_of_real_ranks_has_one_thread_and_leaves_threads_to_them(fork) -> None:
    """torch, its OpenMP and numpy are there, and none of them has begun to work."""
    environment = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    async with ForkServer(RANK_COMMAND, environment) as server:
        with capture_logs() as lines:
            await fork(server)
        assert lines == []
        assert "Threads:\t1\n" in proc(server.pid, "status")
        libraries = proc(server.pid, "maps")
        assert "libtorch" in libraries
        assert "openblas" in libraries


async def test_nothing_is_left_open_or_running(fork) -> None:
    before = open_fds()
    async with ForkServer(OBEDIENT, {}) as server:
        ranks = [await fork(server, rank) for rank in range(2)]
        ranks[1].ask("rank")
        await end([ranks[0].process], grace_s=0.0)
    assert await ranks[1].exit_code() == -signal.SIGKILL
    assert gone(server.pid)
    async with asyncio.timeout(20):  # a thread closes its end when it has seen the rank's
        while len(left := {fd: target for fd, target in open_fds().items() if fd not in before}) > len(ranks):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(left) == len(ranks), f"besides the test's own ends of the channels: {left}"


def test_a_program_that_is_not_there_is_an_error_at_once() -> None:
    async def start() -> None:
        before = open_fds()
        with pytest.raises(FileNotFoundError):
            ForkServer(("/nonexistent/python",), {})
        assert open_fds() == before

    asyncio.run(start())
