"""Clients of several orchestrators: which they try, and that a call reaches the one that leads."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from ryzanstein import errors
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.leaders.addresses import OrchestratorAddresses
from ryzanstein.rpc.client import PLAIN
from ryzanstein.rpc.server import RpcServer
from ryzanstein.rpc.status import answered
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1.orchestrator_pb2_grpc import (
    OrchestratorServiceServicer,
    OrchestratorServiceStub,
    add_OrchestratorServiceServicer_to_server,
)

ORCHESTRATOR = Peer(PeerRole.ORCHESTRATOR)


def test_a_leader_that_is_named_comes_first_then_the_others_in_turn():
    addresses = OrchestratorAddresses("a:1, b:1,c:1")
    assert addresses.current == "a:1"
    assert addresses.failed("c:1")
    assert addresses.current == "c:1"
    assert addresses.failed()
    assert addresses.current == "b:1"
    assert not addresses.failed("a:1"), "all were tried, whoever is named"
    assert addresses.current == "c:1"
    addresses.answered()
    assert addresses.failed("x:9")
    assert addresses.current == "x:9", "one that is not configured"


def test_one_that_was_silent_is_passed_over_for_a_while_whoever_names_it():
    clock = [0.0]
    addresses = OrchestratorAddresses("a:1,b:1", lambda: clock[0])
    assert addresses.failed(silent=True)
    for _ in range(3):
        assert addresses.current == "b:1"
        assert not addresses.failed("a:1")
    clock[0] = 11
    assert addresses.failed("a:1")
    assert addresses.current == "a:1"


def test_a_single_one_is_tried_again_after_a_pause_and_may_name_another():
    addresses = OrchestratorAddresses("a:1")
    assert not addresses.several
    assert not addresses.failed(silent=True)
    assert addresses.current == "a:1"
    assert addresses.failed("b:1")
    assert (addresses.current, addresses.several) == ("b:1", True)
    assert not addresses.failed()
    assert addresses.current == "a:1"


class Standby(OrchestratorServiceServicer):
    """Answers with its name, or with an error."""

    def __init__(self) -> None:
        self.error: RyzansteinError | None = None
        self.calls, self.delay_s, self.finds_s = 0, 0.0, 0.0

    async def start(self) -> str:
        self.server = RpcServer("127.0.0.1", 0, [])
        add_OrchestratorServiceServicer_to_server(self, self.server.server)
        await self.server.start()
        return f"127.0.0.1:{self.server.port}"

    async def DrainNode(self, request: Any, context: Any) -> pb.DrainNodeResponse:
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return pb.DrainNodeResponse()

    async def DeployModel(self, request: Any, context: Any) -> pb.DeployModelResponse:
        await self.DrainNode(request, context)
        return pb.DeployModelResponse()

    async def ListDeployedAdapters(self, request: Any, context: Any) -> pb.ListDeployedAdaptersResponse:
        await asyncio.sleep(self.finds_s)
        if self.error is not None:
            raise self.error
        return pb.ListDeployedAdaptersResponse()


@pytest.fixture
async def pair():
    servers = [Standby(), Standby()]
    addresses = [await each.start() for each in servers]
    yield servers, addresses
    for each in servers:
        await each.server.stop(0)


async def drain(addresses: str, timeout_s: float = 5.0) -> None:
    async with PLAIN.open(addresses, ORCHESTRATOR) as channel:
        await answered(OrchestratorServiceStub(channel).DrainNode(pb.DrainNodeRequest(node_id="a"), timeout=timeout_s))


async def deploy(addresses: str, timeout_s: float = 5.0) -> None:
    request = pb.DeployModelRequest(deployment=pb.Deployment(model="m", path="/m"), reload=True)
    async with PLAIN.open(addresses, ORCHESTRATOR) as channel:
        await answered(OrchestratorServiceStub(channel).DeployModel(request, timeout=timeout_s))


def not_leader(address: str = "") -> RyzansteinError:
    metadata = {"leader": address} if address else {}
    return RyzansteinError("it stands by", Code.FAILED_PRECONDITION, "NOT_LEADER", metadata)


async def test_a_call_goes_on_to_the_leader_that_is_named_though_only_the_other_is_configured(pair):
    (standby, leader), (first, second) = pair
    standby.error = not_leader(second)
    await drain(first)
    assert (standby.calls, leader.calls) == (1, 1)


async def test_a_call_waits_for_a_leader_as_long_as_it_may(pair):
    (one, other), addresses = pair
    one.error = other.error = not_leader()
    with pytest.raises(RyzansteinError) as refused:
        await drain(",".join(addresses), 0.7)
    assert refused.value.reason == "NOT_LEADER"

    async def lead() -> None:
        await asyncio.sleep(0.5)
        other.error = None

    leading, began = asyncio.create_task(lead()), time.monotonic()
    await drain(",".join(addresses))
    assert time.monotonic() - began < 4
    await leading


async def test_a_call_goes_past_an_orchestrator_that_is_gone(pair):
    (one, other), addresses = pair
    await one.server.stop(0)
    await drain(",".join(addresses))
    assert other.calls == 1
    with pytest.raises(RyzansteinError) as failed:
        await drain(addresses[0], 3)
    assert failed.value.code is Code.UNAVAILABLE


async def test_the_answer_of_a_leader_that_cannot_is_final(pair):
    (one, other), addresses = pair
    for error in (errors.unavailable("STORE_UNAVAILABLE", "the disk failed"), errors.not_found("node", "a")):
        one.error = error
        with pytest.raises(RyzansteinError) as failed:
            await drain(",".join(addresses))
        assert failed.value.reason == error.reason
    assert other.calls == 0


async def test_a_call_goes_past_an_orchestrator_that_is_frozen(pair):
    (frozen, other), addresses = pair
    frozen.delay_s = 30.0
    other.error = not_leader(addresses[0])

    async def lead() -> None:
        await asyncio.sleep(1.2)
        other.error = None

    leading = asyncio.create_task(lead())
    await drain(",".join(addresses), 1.8)
    assert frozen.calls == 1, "it is not asked again, although the other one names it"
    await leading
    with pytest.raises(RyzansteinError) as failed:
        await drain(addresses[0], 0.3)
    assert failed.value.code is Code.DEADLINE_EXCEEDED


async def test_what_must_not_be_done_twice_is_not_asked_again_when_its_answer_is_lost(pair):
    (frozen, other), addresses = pair
    frozen.delay_s = 30.0
    with pytest.raises(RyzansteinError, match="it may have done this or not, look before") as failed:
        await deploy(",".join(addresses), 0.5)
    assert failed.value.code is Code.UNAVAILABLE
    asking = asyncio.create_task(deploy(",".join(addresses), 20))
    async with asyncio.timeout(10):
        while frozen.calls < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await frozen.server.server.stop(None)
    with pytest.raises(RyzansteinError, match="it may have done this or not, look before") as failed:
        await asking
    assert failed.value.code is Code.UNAVAILABLE
    assert (frozen.calls, other.calls) == (2, 0)


async def test_what_must_not_be_done_twice_goes_to_the_one_that_leads_and_answers(pair):
    (frozen, leader), addresses = pair
    frozen.finds_s = 30.0
    await deploy(",".join(addresses), 3)
    assert (frozen.calls, leader.calls) == (0, 1)
    leader.finds_s = 30.0
    with pytest.raises(RyzansteinError) as failed:
        await deploy(",".join(addresses), 0.5)
    assert failed.value.code is Code.DEADLINE_EXCEEDED, "nobody was asked to do it"
    leader.error, leader.finds_s = not_leader(), 0.0
    frozen.finds_s = 0.0
    await deploy(",".join(reversed(addresses)))
    assert (frozen.calls, leader.calls) == (1, 1)
    leader.error = None
    await frozen.server.stop(0)
    await deploy(",".join(addresses))
    assert leader.calls == 2, "the other one is not reached"
