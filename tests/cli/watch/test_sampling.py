"""How a watch asks: over connections that stay open, and not at all while it is paused."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.watch.sampling import ClusterSampler, KeptChannels, KeptDialer, KeptRouter, SourceQuestions
from ryzanstein.cluster import Beat, Node, NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.client import PLAIN
from ryzanstein.survey.reach import KeyedRouter

ANY = Peer(PeerRole.NODE)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_channel_is_opened_once_and_lent() -> None:
    channels = KeptChannels()
    dialer = KeptDialer(PLAIN, channels)
    async with dialer.open("127.0.0.1:1", ANY) as first:
        pass
    async with dialer.open("127.0.0.1:1", ANY) as second, dialer.open("127.0.0.1:2", ANY) as other:
        assert first is second
        assert first is not other
    assert first.get_state().name == "IDLE", "who used it did not close it"
    await channels.close()
    assert first.get_state().name == "SHUTDOWN"


async def test_one_that_nobody_uses_any_more_is_closed() -> None:
    clock = Clock()
    channels = KeptChannels(clock)
    dialer = KeptDialer(PLAIN, channels)
    async with dialer.open("127.0.0.1:1", ANY) as old, dialer.open("127.0.0.1:2", ANY) as used:
        pass
    clock.now = 50.0
    async with dialer.open("127.0.0.1:2", ANY):
        pass
    clock.now = 70.0
    await channels.close_unused()
    assert (old.get_state().name, used.get_state().name) == ("SHUTDOWN", "IDLE")
    async with dialer.open("127.0.0.1:1", ANY) as again:
        assert again is not old
    await channels.close()


async def test_a_router_is_reached_over_one_channel_and_its_key_is_not_shown() -> None:
    channels = KeptChannels()
    router = KeptRouter("127.0.0.1:1", "rk-secret", None, channels)
    async with router.open() as first, router.open() as second:
        assert first is second
    assert "secret" not in repr(router)
    await channels.close()


async def test_samples_follow_one_another_and_name_who_is_silent_in_one_order(orchestrator: Any) -> None:
    orchestrator.add(Node("node-0", "", state=NodeState.READY, model="demo"), Beat(state=NodeState.READY, model="demo"))
    sampler = ClusterSampler(orchestrator.address, KeyedRouter(f"127.0.0.1:{free_ports(1)[0]}"), PLAIN, 0.1)
    samples = sampler.samples()
    first = await anext(samples)
    orchestrator.nodes[0] = Node("node-0", orchestrator.nodes[0].address, state=NodeState.FAILED, model="demo")
    second = await anext(samples)
    await samples.aclose()
    assert [status.nodes[0].node.state for status in (first, second)] == [NodeState.READY, NodeState.FAILED]
    assert list(first.errors) == ["router"]


async def test_no_channel_is_left_open_when_a_watch_ends(orchestrator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    whole = KeptChannels.channel

    def channel(self: KeptChannels, key: object, make: Any) -> Any:
        lent = whole(self, key, make)
        opened.append(lent)
        return lent

    monkeypatch.setattr(KeptChannels, "channel", channel)
    samples = ClusterSampler(orchestrator.address, KeyedRouter("127.0.0.1:1"), PLAIN, 0.1).samples()
    await anext(samples)
    await samples.aclose()
    assert opened
    assert {each.get_state().name for each in opened} == {"SHUTDOWN"}


async def test_nobody_is_asked_while_it_is_paused(orchestrator: Any) -> None:
    sampler = ClusterSampler(orchestrator.address, KeyedRouter("127.0.0.1:1"), PLAIN, 0.05)
    samples = sampler.samples()
    await anext(samples)
    sampler.pause(True)
    waiting = asyncio.ensure_future(anext(samples))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    sampler.pause(False)
    await asyncio.wait_for(waiting, 10)
    await samples.aclose()


async def test_the_first_sample_waits_for_a_service_that_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ryzanstein.cli.watch.sampling.PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections and never says a word
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        samples = ClusterSampler(address, KeyedRouter(address), PLAIN, 0.1).samples()
        status = await asyncio.wait_for(anext(samples), 20)
        await samples.aclose()
    assert {error.partition(":")[0] for error in status.errors.values()} == {"DEADLINE_EXCEEDED"}
    assert list(status.errors) == ["orchestrator", "router"]


async def test_a_service_that_freezes_does_not_hold_up_what_the_others_say(
    orchestrator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node and the router are silent for as long as the test lives; the state of another node goes on."""
    monkeypatch.setattr("ryzanstein.cli.watch.sampling.PATIENCE_S", 600.0)
    monkeypatch.setattr("ryzanstein.survey.look.NODE_TIMEOUT_S", 600.0)
    monkeypatch.setattr("ryzanstein.survey.look.TIMEOUT_S", 600.0)
    orchestrator.add(Node("node-0", "", state=NodeState.READY, model="demo"), Beat(state=NodeState.READY, model="demo"))
    router = f"127.0.0.1:{free_ports(1)[0]}"
    samples = ClusterSampler(orchestrator.address, KeyedRouter(router), PLAIN, 0.1).samples()
    assert "router" in (await anext(samples)).errors
    host, port = router.split(":")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server((host, int(port))):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        orchestrator.nodes.append(Node("node-1", address, state=NodeState.READY, model="demo"))
        for state in (NodeState.DRAINING, NodeState.FAILED, NodeState.READY) * 3:
            orchestrator.nodes[0] = replace(orchestrator.nodes[0], state=state)
            status = await asyncio.wait_for(anext(samples), 20)
            assert [node.node.state for node in status.nodes] == [state, NodeState.READY]
            assert "no answer yet" in status.nodes[1].error
        await samples.aclose()


async def test_the_last_answer_stands_in_until_the_question_fails() -> None:
    questions, answers = SourceQuestions(0.01), asyncio.Queue[int | RyzansteinError]()

    async def question() -> int:
        if isinstance(answer := await answers.get(), RyzansteinError):
            raise answer
        return answer

    async def asked() -> int:
        try:
            return await questions.ask(("node", "a"), question)
        finally:
            questions.sampled()

    answers.put_nowait(1)
    assert [await asked(), await asked(), await asked()] == [1, 1, 1]
    answers.put_nowait(RyzansteinError("gone", Code.UNAVAILABLE, ""))
    for _ in range(3):
        with pytest.raises(RyzansteinError, match="gone"):
            await asked()
    answers.put_nowait(2)
    assert await asked() == 2
    await questions.close()


async def test_who_is_not_asked_any_more_is_forgotten() -> None:
    questions, ended = SourceQuestions(0.01), asyncio.Event()

    async def silent() -> int:
        try:
            return await asyncio.Future()
        finally:
            ended.set()

    questions.sampled()
    with pytest.raises(RyzansteinError, match="no answer yet"):
        await questions.ask(("node", "a"), silent)
    questions.sampled()
    questions.sampled()
    await asyncio.wait_for(ended.wait(), 20)


async def test_an_interval_is_kept_between_two_samples(orchestrator: Any) -> None:
    samples = ClusterSampler(orchestrator.address, KeyedRouter("127.0.0.1:1"), PLAIN, 0.6).samples()
    await anext(samples)
    began = time.monotonic()
    await anext(samples)
    await samples.aclose()
    assert time.monotonic() - began >= 0.3
