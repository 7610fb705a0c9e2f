"""How a watch asks: over connections that stay open, and not at all while it is paused."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.watch.sampling import ClusterSampler, KeptChannels, KeptDialer, KeptRouter
from ryzanstein.cluster import Beat, Node, NodeState
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


async def test_a_service_that_is_frozen_holds_up_a_sample_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ryzanstein.cli.watch.sampling.PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections and never says a word
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        samples = ClusterSampler(address, KeyedRouter(address), PLAIN, 0.1).samples()
        began = time.monotonic()
        status = await anext(samples)
        await samples.aclose()
    assert time.monotonic() - began < 2.0
    assert {error.partition(":")[0] for error in status.errors.values()} == {"DEADLINE_EXCEEDED"}
    assert list(status.errors) == ["orchestrator", "router"]


async def test_an_interval_is_kept_between_two_samples(orchestrator: Any) -> None:
    samples = ClusterSampler(orchestrator.address, KeyedRouter("127.0.0.1:1"), PLAIN, 0.6).samples()
    await anext(samples)
    began = time.monotonic()
    await anext(samples)
    await samples.aclose()
    assert time.monotonic() - began >= 0.3
