import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.messages import CancelGroup, StepEvents, SubmitGroup
from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.supervision.group import GroupEvents, LossCause, RanksLost, RanksRefused
from ryzanstein.worker.supervision.watchdog import StallBounds

pytestmark = pytest.mark.distributed

ECHO = (sys.executable, str(Path(__file__).with_name("echo_rank.py")))
BOUNDS = GroupBounds(start_s=20, watch_interval_s=0.05, stall=StallBounds(min_s=0.5))


class Harness:
    """Starts groups and collects what they say."""

    def __init__(self) -> None:
        self.steps: list[StepEvents] = []
        self.submitted = 0
        self.arrived = asyncio.Event()
        self.groups: list[RankGroup] = []
        self.servers: list[ForkServer] = []

    def group(self, model: str = "echo", tp: int = 2, bounds: GroupBounds = BOUNDS) -> RankGroup:
        events = GroupEvents(self._on_step, lambda trace: None, lambda: self.submitted > 0)
        self.servers.append(ForkServer(ECHO, {}))
        group = RankGroup(RankSpec(model, tp), bounds, events, self.servers[-1])
        self.groups.append(group)
        return group

    def _on_step(self, events: StepEvents) -> None:
        self.steps.append(events)
        self.submitted -= len(events.ended)
        self.arrived.set()

    def submit(self, group: RankGroup, max_tokens: int, prompt: tuple[int, ...] = (1,)) -> None:
        self.submitted += 1
        group.send(SubmitGroup(self.submitted, list(prompt), SamplingParams(), max_tokens, [], [[]], [False]))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until it holds after a step's events."""
        async with asyncio.timeout(20):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()

    async def tokens(self, number: int) -> list[int]:
        """Waits for so many tokens."""
        await self.until(lambda: sum(len(step.token_ids) for step in self.steps) >= number)
        return [token for step in self.steps for token in step.token_ids]


@pytest.fixture
async def harness():
    harness = Harness()
    yield harness
    for group in harness.groups:
        await group.end(graceful=False)
    for server in harness.servers:
        await server.close()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("tp", [1, 3])
async def test_every_rank_answers_and_steps_come_back_in_order(harness, tp):
    group = harness.group(tp=tp)
    answers = await group.start()
    assert [answer.rank for answer in answers] == list(range(tp))
    harness.submit(group, 50)
    assert await harness.tokens(50) == list(range(50))
    assert {progress.step for progress in group.progress()} == {50}
    assert len({progress.pid for progress in group.progress()}) == tp
    assert not group.lost.done()


async def test_a_message_larger_than_a_socket_buffer_arrives(harness):
    group = harness.group(tp=1)
    await group.start()
    harness.submit(group, 2, prompt=tuple(range(300_000)))
    assert await harness.tokens(2) == [0, 1]


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_is_reported_at_once_and_by_name(harness, victim):
    group = harness.group()
    await group.start()
    harness.submit(group, 100_000)
    await harness.tokens(3)
    began = time.monotonic()
    os.kill(group.progress()[victim].pid, signal.SIGKILL)
    loss = await asyncio.wait_for(group.lost, 5)
    assert (loss.rank, loss.cause) == (victim, LossCause.DIED)
    # The first where the fork server reported the end within milliseconds.
    assert "SIGKILL" in loss.message or "was killed" in loss.message
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_stopped_rank_is_a_stall_that_names_it(harness, victim):
    group = harness.group()
    await group.start()
    harness.submit(group, 100_000)
    await harness.tokens(20)
    os.kill(group.progress()[victim].pid, signal.SIGSTOP)
    loss = await asyncio.wait_for(group.lost, 10)
    assert (loss.rank, loss.cause) == (victim, LossCause.STALLED)
    if victim == 1:
        assert "rank 0 waits in all_reduce" in loss.message


async def test_a_rank_that_was_stopped_while_idle_is_found_when_work_comes(harness):
    group = harness.group()
    await group.start()
    harness.submit(group, 20)
    await harness.tokens(20)
    os.kill(group.progress()[0].pid, signal.SIGSTOP)
    harness.submit(group, 1)
    loss = await asyncio.wait_for(group.lost, 10)
    assert (loss.rank, loss.cause) == (0, LossCause.STALLED)


async def test_a_stopped_rank_is_found_also_when_all_that_ran_there_was_cancelled(harness):
    group = harness.group()
    await group.start()
    harness.submit(group, 20)
    await harness.tokens(20)
    os.kill(group.progress()[0].pid, signal.SIGSTOP)
    group.send(CancelGroup(1))
    loss = await asyncio.wait_for(group.lost, 10)
    assert (loss.rank, loss.cause) == (0, LossCause.STALLED)


@pytest.mark.parametrize("worked", [True, False])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.long
async def test_a_rank_that_is_stopped_while_idle_is_found_without_any_work(harness, victim, worked):
    bounds = replace(BOUNDS, idle_check_s=0.1)
    group = harness.group(tp=3, bounds=bounds)
    await group.start()
    if worked:
        harness.submit(group, 20)
        await harness.tokens(20)
    os.kill(group.progress()[victim].pid, signal.SIGSTOP)
    loss = await asyncio.wait_for(group.lost, 10)
    assert (loss.rank, loss.cause) == (victim, LossCause.STALLED)


async def test_idle_ranks_that_answer_are_never_lost(harness):
    group = harness.group(tp=3, bounds=replace(BOUNDS, idle_check_s=0.05))
    await group.start()
    await harness.until(lambda: group.progress()[2].answered >= 20)
    assert not group.lost.done()


async def test_messages_to_idle_ranks_do_not_change_what_a_step_is_expected_to_take(harness):
    """They take no time: the p99 of many of them would call the next step a stall."""
    bounds = GroupBounds(start_s=20, watch_interval_s=0.01, stall=StallBounds(min_s=0.01, factor=200.0))
    group = harness.group(tp=1, bounds=bounds)
    await group.start()
    harness.submit(group, 5)
    await harness.tokens(5)
    bound_s = group._watchdog.bound_s(group.progress())
    for _ in range(600):
        group.send(CancelGroup(7))
    await harness.until(lambda: len(harness.steps) == 605)
    assert group._watchdog.bound_s(group.progress()) == bound_s > 0.2


async def test_ranks_that_have_answered_owe_nothing(harness):
    group = harness.group(bounds=GroupBounds(watch_interval_s=0.01, stall=StallBounds(min_s=0.05)))
    await group.start()
    group.send(CancelGroup(1))
    await asyncio.wait_for(harness.arrived.wait(), 10)
    await asyncio.sleep(0.4)
    assert not group.lost.done()


async def test_idle_ranks_are_never_lost(harness):
    group = harness.group(bounds=GroupBounds(watch_interval_s=0.01, stall=StallBounds(min_s=0.05)))
    await group.start()
    await asyncio.sleep(0.4)
    assert not group.lost.done()


async def test_ending_a_group_leaves_no_process_even_a_stopped_one(harness):
    group = harness.group()
    await group.start()
    pids = [progress.pid for progress in group.progress()]
    os.kill(pids[1], signal.SIGSTOP)
    await group.end(graceful=True)
    assert all(gone(pid) for pid in pids)


async def test_a_refusal_says_why(harness):
    with pytest.raises(RanksRefused, match=r"lm_head\.weight"):
        await harness.group("refuse").start()


async def test_a_crash_while_starting_is_a_loss(harness):
    with pytest.raises(RanksLost) as caught:
        await harness.group("crash").start()
    assert caught.value.loss.cause is LossCause.DIED
    assert "exited with code 1" in caught.value.loss.message


async def test_a_rank_that_never_becomes_ready_is_named(harness):
    with pytest.raises(RanksLost) as caught:
        await harness.group("never ready", bounds=GroupBounds(start_s=1.0)).start()
    assert caught.value.loss.cause is LossCause.START
    # None becomes ready: which one moved last is chance.
    assert re.search("no rank moved for 1 s during the start; rank [01] is in start", caught.value.loss.message)


async def test_a_start_that_moves_may_take_longer_than_the_limit(harness):
    began = time.monotonic()
    answers = await harness.group("slow", bounds=GroupBounds(start_s=1.0, watch_interval_s=0.05)).start()
    assert len(answers) == 2
    assert time.monotonic() - began > 2.0


async def test_ranks_compile_before_there_are_any(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes its time and fails: ranks then do without kernels."""
    compiler = tmp_path / "slow-cc"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.05; done\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    group = harness.group()
    starting = asyncio.create_task(group.start())
    async with asyncio.timeout(60):
        while not (tmp_path / "called").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.05)
        assert [(rank.phase, rank.pid) for rank in group.progress()] == [("compile", 0)] * 2
        (tmp_path / "go").touch()
        await starting
    assert "compile" not in {rank.phase for rank in group.progress()}
    assert all(rank.pid for rank in group.progress())
