"""Which addresses a node dials: those that its orchestrator named, and without one at least none that no node has."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.cluster import MemberAddresses
from ryzanstein.worker.agent.pages.store import StoreFailed
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes, may_be_dialled

NODES = [
    "127.0.0.1:50061",
    "10.1.2.3:1",
    "[::1]:50061",
    "[fd00::7]:50061",
    "[::ffff:10.0.0.1]:50061",
    "localhost:50061",
    "node-0:50061",
    "node_0.nodes.ns.svc.cluster.local:50061",
    "1-2-3.example.:50061",
    "4node.example:65535",
]
FOREIGN = [
    "",
    "node-0",
    "node-0:",
    "node-0:0",
    "node-0:65536",
    "node-0:+5",
    ":50061",
    "169.254.169.254:80",
    "[::ffff:169.254.169.254]:80",
    "[2002:a9fe:a9fe::]:80",
    "2852039166:80",
    "0xa9fea9fe:80",
    "0xa9.254.43518:80",
    "0251.0376.0251.0376:80",
    "169.254.43518:80",
    "a.169.254.1:80",
    "0.0.0.0:50061",
    "[::]:50061",
    "224.0.0.1:50061",
    "255.255.255.255:50061",
    "[ff02::1]:50061",
    "[fe80::1]:50061",
    "[fe80::1%eth0]:50061",
    "unix:/run/x.sock",
    "unix:50061",
    "UNIX:50061",
    "unix-abstract:50061",
    "dns:50061",
    "dns:///node-0:50061",
    "dns://10.0.0.1/node-0:50061",
    "xds:///a:50061",
    "vsock:3:50061",
    "ipv4:10.0.0.1:50061,10.0.0.2:50061",
    "http://node-0:80",
    "node-0/x:80",
    "node 0:80",
    "user@node-0:80",
    "nöde:80",
    "node-0%2f:80",
    f"{'a' * 64}:80",
]


class Known:
    """Known nodes, a clock, and what was refused."""

    def __init__(self) -> None:
        self.now, self.refused = 1000.0, list[str]()
        self.nodes = KnownNodes(self.refused.append, lambda: self.now)

    async def refuses(self, address: str) -> bool:
        try:
            await self.nodes.check(address)
        except StoreFailed as failure:
            return failure.cause == "unknown_node"
        return False


@pytest.mark.parametrize("address", NODES)
def test_hosts_and_their_ports_are_dialled(address: str) -> None:
    assert may_be_dialled(address)


@pytest.mark.parametrize("address", FOREIGN)
def test_what_is_no_node_is_not_dialled(address: str) -> None:
    assert not may_be_dialled(address)


@given(st.text(max_size=40) | st.from_regex(r"[a-z0-9.:/%\[\]-]{1,30}:[0-9]{1,5}", fullmatch=True))
def test_any_text_is_judged(address: str) -> None:
    if may_be_dialled(address):
        host, _, port = address.rpartition(":")
        assert host.isascii()
        assert not {*"/@% ,"} & {*host}
        assert port.isdecimal()


async def test_without_an_orchestrator_the_router_is_believed_as_far_as_it_may_be_right() -> None:
    known = Known()
    assert not await known.refuses("10.9.9.9:50061")
    assert await known.refuses("169.254.169.254:80")
    assert known.refused == ["address"]


async def test_of_a_cluster_only_its_nodes_are_dialled() -> None:
    known = Known()
    known.nodes.follow(MemberAddresses(b"1", ("10.0.0.1:50061", "unix:/x")))
    assert not await known.refuses("10.0.0.1:50061")
    began = time.monotonic()
    refusals = await asyncio.gather(*map(known.refuses, ("10.0.0.2:50061", "10.0.0.1:50062", "unix:/x")))
    assert refusals == [True] * 3
    assert known.refused == ["address", "not_member", "not_member"]
    assert time.monotonic() - began < 3, "they wait for the next beat, together"


async def test_a_node_that_joins_meanwhile_is_waited_for() -> None:
    known = Known()
    known.nodes.follow(MemberAddresses(b"1", ("10.0.0.1:1",)))
    waiting = asyncio.create_task(known.refuses("10.0.0.2:1"))
    await asyncio.wait_for(known.nodes.asked(30), 5)
    known.nodes.follow(MemberAddresses(b"2", ("10.0.0.1:1", "10.0.0.3:1")))
    await asyncio.sleep(0)
    known.nodes.follow(MemberAddresses(b"3", ("10.0.0.2:1",)))
    assert not await waiting


async def test_who_left_is_known_for_a_minute() -> None:
    known = Known()
    known.nodes.follow(MemberAddresses(b"1", ("10.0.0.1:1", "10.0.0.2:1")))
    known.nodes.follow(MemberAddresses(b"2", ("10.0.0.1:1",)))
    known.now += 59
    known.nodes.follow(MemberAddresses(b"3", ("10.0.0.1:1", "10.0.0.3:1")))
    assert "10.0.0.2:1" in known.nodes
    known.now += 2
    assert "10.0.0.2:1" not in known.nodes
    assert await known.refuses("10.0.0.2:1")
    assert known.nodes.digest == b"3"


async def test_a_change_is_taken_by_a_node_that_knows_what_it_starts_from() -> None:
    known = Known()
    known.nodes.follow(MemberAddresses(b"1", ("10.0.0.1:1", "10.0.0.2:1")))
    known.nodes.follow(MemberAddresses(b"2", ("10.0.0.3:1",), b"1", ("10.0.0.2:1",)))
    assert ("10.0.0.1:1" in known.nodes, "10.0.0.3:1" in known.nodes, known.nodes.digest) == (True, True, b"2")
    known.nodes.follow(MemberAddresses(b"3", ("10.0.0.4:1",), b"1", ("10.0.0.1:1",)))
    assert ("10.0.0.4:1" in known.nodes, known.nodes.digest) == (False, b"2"), "another beat was answered first"
    known.now += 59
    assert "10.0.0.2:1" in known.nodes
    known.now += 2
    assert ("10.0.0.1:1" in known.nodes, "10.0.0.2:1" in known.nodes) == (True, False)


async def test_nobody_who_asks_makes_a_node_beat_without_end() -> None:
    known = Known()
    known.nodes.follow(MemberAddresses(b"1", ("10.0.0.1:1",)))
    asking = asyncio.gather(*(known.refuses(f"10.0.1.{i}:1") for i in range(200)))
    began, beats = time.monotonic(), 0
    while not asking.done():
        await known.nodes.asked(0.5)
        beats += 1
    assert beats <= 1 + (time.monotonic() - began) / 0.1
    assert await asking == [True] * 200
