"""Routers that share nothing but the members choose alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ryzanstein.cluster import Load, NodeState
from ryzanstein.router.choose import (
    Affinity,
    BalanceSettings,
    Chooser,
    Members,
    NodeView,
    PolicyBounds,
    PolicyChoice,
    PolicyName,
)

POLICIES: list[PolicyName] = ["affinity", "bounded", "weighted", "prefix"]
MEMBERS = st.dictionaries(st.text("abcdef0123456789-", min_size=1, max_size=8), st.integers(1, 256), min_size=2, max_size=10)
SESSIONS = st.lists(st.binary(min_size=1, max_size=24), min_size=1, max_size=20, unique=True)


class Deaf:
    """Observes nothing."""

    def chosen(self, *what: object) -> None: ...
    def judged(self, *what: object) -> None: ...
    def switched(self, *what: object) -> None: ...


def router(policy: PolicyName, clock: Callable[[], float] = time.monotonic) -> Callable[[dict[str, int], bytes], list[str]]:
    chooser = Chooser(PolicyChoice(policy, bounds=PolicyBounds()), BalanceSettings(), Deaf(), clock)

    def choose(members: dict[str, int], key: bytes) -> list[str]:
        views = [NodeView(node, "m", NodeState.READY, Load(capacity=size)) for node, size in members.items()]
        ranking = chooser.rank(Members.of(views), "m", Affinity(key, True))
        chooser.place(ranking, ranking.node_ids[0])
        return list(ranking.node_ids)

    return choose


def shuffled(members: dict[str, int], draw: Any) -> dict[str, int]:
    names = list(members)
    draw.shuffle(names)
    return {name: members[name] for name in names}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(policy=st.sampled_from(POLICIES), members=MEMBERS, sessions=SESSIONS, draw=st.randoms(use_true_random=False))
def test_every_router_has_the_same_primary_and_the_same_backup(
    policy: PolicyName, members: dict[str, int], sessions: list[bytes], draw: Any
) -> None:
    routers = [router(policy) for _ in range(3)]
    for key in sessions:
        orders = [choose(shuffled(members, draw), key) for choose in routers]
        assert orders[0] == orders[1] == orders[2]
        assert len(orders[0]) == len(members)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(policy=st.sampled_from(POLICIES), members=MEMBERS, sessions=SESSIONS, draw=st.randoms(use_true_random=False))
def test_a_member_that_leaves_moves_its_own_sessions_to_their_backup_and_no_others(
    policy: PolicyName, members: dict[str, int], sessions: list[bytes], draw: Any
) -> None:
    gone = draw.choice(sorted(members))
    rest = {name: size for name, size in members.items() if name != gone}
    before, after = router(policy), router(policy)
    for key in sessions:
        primary, *others = before(members, key)
        assert after(rest, key)[0] == (others[0] if primary == gone else primary)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(policy=st.sampled_from(POLICIES), members=MEMBERS, sessions=SESSIONS, size=st.integers(1, 256))
def test_a_member_that_joins_takes_sessions_and_none_moves_between_the_others(
    policy: PolicyName, members: dict[str, int], sessions: list[bytes], size: int
) -> None:
    before, after = router(policy), router(policy)
    for key in sessions:
        primary = after(members | {"newcomer": size}, key)[0]
        assert primary in ("newcomer", before(members, key)[0])


def test_over_joins_and_leaves_only_a_share_of_one_in_n_moves() -> None:
    keys = [f"session:{i}".encode() for i in range(3000)]
    members = {f"n{i}": 8 for i in range(10)}
    choose = router("affinity")
    before = {key: choose(members, key)[0] for key in keys}
    for changed in (members | {"n10": 8}, {name: 8 for name in members if name != "n3"}):
        moved = sum(choose(changed, key)[0] != before[key] for key in keys) / len(keys)
        assert 0.07 < moved < 0.13
    assert all(choose(members, key)[0] == before[key] for key in keys)


def test_routers_that_see_the_same_traffic_agree_on_the_overflow(clock: Any) -> None:
    """Each bounds its own placements. Where their traffic is alike, so is what they shed; where they differ, a session
    without a remembered home computes its prompt anew, and nothing else happens."""
    routers = [router("bounded", clock) for _ in range(3)]
    members = {f"n{i}": 64 for i in range(5)}
    agreed = 0
    for turn in range(12_000):
        clock.now += 0.02
        key = f"session:{turn % 150}".encode()
        agreed += turn >= 6000 and len({choose(members, key)[0] for choose in routers}) == 1
    assert agreed == 6000
