"""What a node does when its ranks, or the agent itself, are killed or stopped. Real processes and real signals."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Sequence

import pytest

from ryzanstein.errors import Code
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import debug_pb2
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.debug_pb2_grpc import DebugServiceStub

pytestmark = pytest.mark.cluster


async def ready_again(link, since: int) -> None:
    """A READY beat after one that was not."""
    await link.until(lambda: any(beat.state == pb.NODE_STATE_RECOVERING for _, beat in link.beats[since:]), 10)
    await link.until(lambda: link.beats[-1][1].state == pb.NODE_STATE_READY, 60)


@pytest.fixture
async def lossy(link, stub, node):
    """The shared node, which is whole again after each test; its losses before this one are forgotten."""
    await stub.Undrain(pb.UndrainRequest())
    return link, stub, node


@pytest.mark.parametrize("fault", [
    (signal.SIGKILL, 1, "RANK_LOST"),
    (signal.SIGSEGV, 0, "RANK_LOST"),
    (signal.SIGSTOP, 1, "RANK_STALLED"),
])  # fmt: skip
async def test_a_lost_rank_fails_its_generations_by_name_and_the_node_serves_again(lossy, attempt, health, running, fault):
    link, stub, node = lossy
    address = node.address
    number, rank, reason = fault
    before = await stub.GetStatus(pb.GetStatusRequest())
    handle = await link.submit(attempt(max_tokens=1800, ignore_eos=True))
    await link.wait(handle, lambda s: len(s.tokens()) > 10)
    beats = len(link.beats)
    began = time.monotonic()
    if number == signal.SIGSTOP:
        began = await _stop_in_a_layer(stub, before.ranks[rank])
    else:
        os.kill(before.ranks[rank].pid, number)
    stream = await link.wait(handle, lambda s: s.failed is not None)
    detected_s = time.monotonic() - began
    assert (stream.failed.code, stream.failed.reason) == (Code.UNAVAILABLE, reason)
    assert stream.failed.node_fault
    assert f"rank {rank}" in stream.failed.message
    assert stream.failed.metadata["rank"] == str(rank)
    assert await health(address, "readiness", until="NOT_SERVING") == "NOT_SERVING"
    assert detected_s < (5.0 if number == signal.SIGSTOP else 1.0)
    refused = await link.run(attempt())
    assert (refused.failed.reason, refused.failed.node_fault) == ("NODE_NOT_READY", False)

    await ready_again(link, beats)
    print(f"{reason}: detected after {detected_s:.3f} s, ready again after {time.monotonic() - began:.3f} s")
    phases = [line["rank_0"] for line in node.events if line["event"] == "ranks ready"][-1]
    print("start by phases:", {name: round(duration_s, 3) for name, duration_s in phases.items()})
    assert await health(address, "readiness", until="SERVING") == "SERVING"
    assert not any(running(status.pid) for status in before.ranks)
    after = await stub.GetStatus(pb.GetStatusRequest())
    assert after.rank_restarts == before.rank_restarts + 1
    assert after.kv_blocks_held == 0
    rest = await link.run(attempt(max_tokens=8, ignore_eos=True))
    assert rest.tokens() == stream.tokens()[:8]
    _check_evidence(node.events, after.recent_losses[-1], number)
    async with open_channel(address) as channel:
        autopsies = (await DebugServiceStub(channel).DumpStacks(debug_pb2.DumpStacksRequest(), timeout=10)).autopsies
    assert len(autopsies) <= 5
    assert (autopsies[-1].loss.rank, autopsies[-1].loss.cause, len(autopsies[-1].ranks)) == (rank, reason, 2)
    if number == signal.SIGSTOP:
        _check_places(stream.failed.message, autopsies[-1].ranks)


LAYER = r"layer [0-3], (qkv|attention|o|gate-up|down)"


async def _stop_in_a_layer(stub, rank: pb.RankStatus) -> float:
    """Stops a rank while its step in C computes a layer, and another rank waits for it in one. Returns when."""
    draw = random.Random(7)
    for _ in range(200):
        stopped_at = time.monotonic()
        os.kill(rank.pid, signal.SIGSTOP)
        for _ in range(3):
            phases = [status.phase for status in (await stub.GetStatus(pb.GetStatusRequest())).ranks]
            if "layer" in phases[rank.rank] and phases[1 - rank.rank].startswith("all_reduce, layer"):
                return stopped_at
        os.kill(rank.pid, signal.SIGCONT)
        await asyncio.sleep(draw.uniform(0.001, 0.005))
    raise AssertionError(f"never within a layer: {phases}")


def _check_places(message: str, ranks: Sequence[str]) -> None:
    """Checks that the loss and its autopsy name the ranks' collectives, layers and products."""
    stopped = re.search(rf"^rank 1 has not moved for .* s \((?P<at>\w+, {LAYER}), collective (?P<number>\d+)\); ", message)
    waits = re.search(rf"; rank 0 waits in (?P<at>all_reduce, {LAYER}) \(collective (?P<number>\d+)\)$", message)
    assert stopped, message
    assert waits, message
    for found, text in zip((waits, stopped), ranks, strict=True):
        assert f", {found['at']}, collective {found['number']}, still for " in text


def _check_evidence(events: list[dict], loss: pb.RankLoss, number: signal.Signals) -> None:
    """Checks what is known of the ranks that were lost last: their last words, and where all of them were."""
    words = [line for line in events if line["event"] == "rank's last words"]
    if number == signal.SIGSEGV:
        assert (words[-1]["rank"], words[-1]["ended"]) == (loss.rank, "died of SIGSEGV")
        assert ("Segmentation fault" in words[-1]["stack"], "loops.py" in words[-1]["stack"]) == (True, True)
        assert words[-1]["stack"][:512] == loss.last_words[:512]
        assert ": Segmentation fault in " in loss.message
    else:
        assert not loss.last_words
    autopsy = [line for line in events if line["event"] == "ranks lost, what they did"][-1]
    assert (autopsy["rank"], autopsy["cause"]) == (loss.rank, loss.cause)
    assert number == signal.SIGSEGV or "rank-0 " in autopsy["threads"]["rank_0"][0]
    if number == signal.SIGSTOP:
        assert autopsy["missing"] == [1]
        assert autopsy["threads"]["rank_1"][-1].endswith("more threads: T")


async def test_busy_ranks_that_are_asked_where_they_are_go_on_as_if_they_were_not(lossy, attempt):
    link, stub, node = lossy
    before = await stub.GetStatus(pb.GetStatusRequest())
    undisturbed = await link.run(attempt(max_tokens=400, ignore_eos=True))
    handle = await link.submit(attempt(max_tokens=400, ignore_eos=True))
    await link.wait(handle, lambda s: len(s.tokens()) > 2)
    draw = random.Random(7)
    for _ in range(200):
        os.kill(draw.choice(node.rank_pids()), signal.SIGUSR2)
        await asyncio.sleep(draw.uniform(0, 0.005))
    asked = await link.wait(handle, lambda s: s.failed is not None or s.finished)
    assert asked.tokens() == undisturbed.tokens()
    assert (await stub.GetStatus(pb.GetStatusRequest())).rank_restarts == before.rank_restarts


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_stopped_while_idle_is_replaced_before_a_request_needs_it(lossy, attempt, rank):
    link, stub, _ = lossy
    await link.run(attempt())
    before = await stub.GetStatus(pb.GetStatusRequest())
    beats = len(link.beats)
    os.kill(before.ranks[rank].pid, signal.SIGSTOP)
    await ready_again(link, beats)
    after = await stub.GetStatus(pb.GetStatusRequest())
    loss = after.recent_losses[-1]
    assert (after.rank_restarts, loss.rank, loss.cause) == (before.rank_restarts + 1, rank, "RANK_STALLED")
    assert not (await link.run(attempt())).failed


async def test_a_frozen_agent_is_silent_and_its_ranks_survive_it(link, node, stub, attempt):
    """Silence is what the failure detector goes by; time that the agent lost is not held against the ranks."""
    restarts = (await stub.GetStatus(pb.GetStatusRequest())).rank_restarts
    handle = await link.submit(attempt(max_tokens=1900, ignore_eos=True))
    await link.wait(handle, lambda s: len(s.tokens()) > 5)
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(0.3)
        frames = len(link.beats)
        await asyncio.sleep(2.6)
        assert len(link.beats) == frames
    finally:
        os.kill(node.process.pid, signal.SIGCONT)
    await link.until(lambda: len(link.beats) > frames + 5)
    assert (await stub.GetStatus(pb.GetStatusRequest())).rank_restarts == restarts
    await link.cancel(handle)
    indices = link.streams[handle].indices()
    assert indices == list(range(len(indices)))


def test_no_rank_outlives_a_killed_agent(start_node, running):
    node = start_node()
    node.wait_event("ranks ready")
    pids = node.server_pids() + node.rank_pids()
    assert len(pids) == 3
    os.kill(node.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(running, pids))
