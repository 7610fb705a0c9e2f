"""What ranks say of themselves when they crash or are asked, with real processes that load no model."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from ryzanstein.worker.ranks.health import last_words
from ryzanstein.worker.ranks.health.last_words import LastWords, summary
from ryzanstein.worker.ranks.starting.forking import ForkServer

OBEDIENT = (sys.executable, str(Path(__file__).with_name("obedient_rank.py")))


@pytest.fixture
async def rank():
    """A rank, and its word for what it is to do."""
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    async with ForkServer(OBEDIENT, {}) as server:
        with ours, theirs:
            process = await asyncio.wait_for(server.fork(0, (theirs.fileno(),)), 10)
            yield process, ours
            if not process.exited.done():
                process.send_signal(signal.SIGKILL)
                await asyncio.wait_for(asyncio.shield(process.exited), 5)


def ask(channel: socket.socket, word: str) -> bytes:
    channel.send(word.encode())
    return channel.recv(4096)


@pytest.mark.distributed
async def test_a_crash_leaves_its_stack_when_the_process_is_gone(rank) -> None:
    process, channel = rank
    ask(channel, "rank")
    assert process.crash == ""
    os.kill(process.pid, signal.SIGSEGV)
    assert await asyncio.wait_for(asyncio.shield(process.exited), 5) == -signal.SIGSEGV
    assert "obedient_rank.py" in process.crash
    assert summary(process.crash).startswith("Segmentation fault in run (obedient_rank.py, line ")


@pytest.mark.distributed
async def test_a_rank_that_is_asked_before_it_can_answer_lives(rank) -> None:
    process, channel = rank
    for _ in range(20):
        os.kill(process.pid, last_words.ASK)
    assert ask(channel, "rank")
    stacks = await process.stacks(0.0)
    assert [thread.where.partition(" ")[0] for thread in stacks.threads][:1] == ["run"]


@pytest.mark.distributed
async def test_a_rank_that_hangs_in_c_says_where(rank) -> None:
    process, channel = rank
    channel.send(b"hang")
    async with asyncio.timeout(5):
        while (threads := (await process.stacks(0.0)).threads)[0].where.partition(" ")[0] != "hang_in_c":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    main, *others = threads
    assert main.stack.splitlines()[1].endswith("in run")
    assert [thread.name for thread in others] == ["rank-0"], "the thread that holds the sign of life"
    assert "in _hold" in others[0].stack


@pytest.mark.distributed
async def test_a_rank_that_spins_is_told_from_one_that_is_stopped(rank) -> None:
    process, channel = rank
    ask(channel, "rank")
    os.kill(process.pid, signal.SIGSTOP)
    stopped = (await process.stacks(0.05)).threads
    assert {(thread.state, thread.stack, thread.cpu_s) for thread in stopped} == {("T", "", 0.0)}
    os.kill(process.pid, signal.SIGCONT)
    channel.send(b"spin 5")
    async with asyncio.timeout(5):
        while (main := (await process.stacks(0.1)).threads[0]).where.partition(" ")[0] != "spin":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert main.cpu_s > 0


@pytest.mark.distributed
async def test_one_that_has_ended_has_no_threads(rank) -> None:
    process, channel = rank
    channel.send(b"exit 0")
    await asyncio.wait_for(asyncio.shield(process.exited), 5)
    assert not (await process.stacks(0.0)).threads


def test_a_crash_after_half_an_answer_is_found_and_kept() -> None:
    fd = last_words.make()
    words = LastWords(fd)
    try:
        os.write(fd, b'Stack (most recent call first):\n  File "/a/b.py", line 3 in f\n')
        assert words.crash == ""
        words.clear()
        assert words.read() == ""
        os.write(fd, b"Stack (most rece\nFatal Python error: Bus error\n\nCurrent thread 0x1 (most recent call first):\n")
        os.write(fd, b'  File "/a/b.py", line 88 in forward\n')
        words.clear()
        assert summary(words.crash) == "Bus error in forward (b.py, line 88)"
    finally:
        words.close()
    assert summary(words.crash) == "Bus error in forward (b.py, line 88)"
    assert summary("Fatal Python error: Aborted\n\nno frames") == "Aborted"
