"""Which routers a client learns: those that answer, of the same cluster, on a transport as safe as the given one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ryzanstein.client.following.learning import Learning
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.v1 import router_pb2 as pb

HERE, NEAR, FAR = "127.0.0.1:50051", "10.0.0.1:50051", "router.example:50051"


def member(address: str, **more: Any) -> pb.RouterMember:
    return pb.RouterMember(router_id=address, address=address, **{"instance_id": f"start of {address}", **more})


def learning_of(*given: str, tls: bool = False) -> tuple[Learning, RouterChoice]:
    routers = RouterChoice(given, random.Random(1))
    return Learning(routers, tls=tls), routers


def test_a_router_is_learned_when_it_answers_as_one_of_the_same_cluster() -> None:
    learning, routers = learning_of(NEAR)
    members = [member(NEAR), member("10.0.0.2:50051"), member("10.0.0.3:50051")]
    assert learning.named(NEAR, members) == ["10.0.0.2:50051", "10.0.0.3:50051"]
    assert routers.addresses == (NEAR,), "it has not answered"
    assert learning.answered("10.0.0.2:50051", members)
    assert not learning.answered("10.0.0.3:50051", [member("10.0.0.3:50051", instance_id="start of another cluster's")])
    assert not learning.answered("10.0.0.3:50051", [])
    assert routers.addresses == (NEAR, "10.0.0.2:50051")
    assert routers.given == (NEAR,)


@pytest.mark.parametrize(
    ("given", "tls", "named", "of_named", "asked"),
    [
        (NEAR, False, "10.0.0.2:50051", {}, True),
        (NEAR, True, "10.0.0.2:50051", {"tls": True}, True),
        (NEAR, True, "10.0.0.2:50051", {"tls": False}, False),
        (NEAR, False, "10.0.0.2:50051", {"tls": True}, False),
        (HERE, False, "127.0.0.1:50052", {}, True),
        (HERE, False, "10.0.0.2:50051", {}, False),
        (HERE, True, "10.0.0.2:50051", {"tls": True}, True),
        ("unix:/run/router", False, "127.0.0.1:50052", {}, True),
        (NEAR, False, "127.0.0.1:50052", {}, False),
        (NEAR, True, "localhost:50052", {"tls": True}, False),
        ("dns:///router.example:50051", False, "127.0.0.1:50052", {}, False),
        (FAR, False, "10.0.0.2:50051", {"draining": True}, False),
        (FAR, False, "10.0.0.2:50051", {"instance_id": ""}, False),
        (FAR, False, "", {}, False),
        (FAR, False, "10.0.0.2", {}, False),
        (FAR, False, "unix:/run/other", {}, False),
        (FAR, False, "dns:///evil.example:1", {}, False),
        (FAR, False, "xds:///evil:1", {}, False),
        (FAR, False, "10.0.0.2:99999", {}, False),
    ],
)
def test_what_is_less_safe_or_cannot_be_reached_is_not_even_asked(
    given: str, tls: bool, named: str, of_named: dict[str, Any], asked: bool
) -> None:
    learning, routers = learning_of(given, tls=tls)
    assert learning.named(given, [member(named, **of_named)]) == [named] * asked
    assert routers.addresses == (given,)


def test_a_router_that_is_gone_or_drains_is_forgotten_but_a_given_one_never() -> None:
    learning, routers = learning_of(NEAR)
    members = [member(NEAR), member("10.0.0.2:50051"), member("10.0.0.3:50051")]
    for address in learning.named(NEAR, members):
        learning.answered(address, members)
    routers.failed(NEAR, 0.0, "gone")
    assert (current := routers.current(0.5)) != NEAR
    assert learning.named(current, [member("10.0.0.3:50051"), member("10.0.0.2:50051", draining=True)]) == []
    assert routers.addresses == (NEAR, "10.0.0.3:50051")
    assert learning.named("10.0.0.3:50051", []) == []
    assert routers.addresses == (NEAR,)
    assert routers.current(5.0) == NEAR


def test_a_hostile_list_is_bounded() -> None:
    learning, _ = learning_of(NEAR)
    assert len(learning.named(NEAR, [member(f"10.0.{i}.2:50051") for i in range(200)])) == 16


def test_it_is_asked_once_in_a_minute_and_one_that_cannot_say_it_hardly_ever() -> None:
    learning, _ = learning_of(NEAR)
    assert [learning.asks(now) for now in (0.0, 1.0, 59.0, 60.0, 61.0)] == [True, False, False, True, False]
    learning.failed(RyzansteinError("reset", Code.UNAVAILABLE, ""), 100.0)
    assert [learning.asks(now) for now in (104.0, 105.0)] == [False, True]
    learning.failed(RyzansteinError("of an earlier release", Code.UNIMPLEMENTED, ""), 200.0)
    assert [learning.asks(now) for now in (3000.0, 3800.0)] == [False, True]
    off = Learning(RouterChoice([NEAR], random.Random(1)), tls=False, on=False)
    assert not off.asks(1e9)
