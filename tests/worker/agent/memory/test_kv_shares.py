"""Lending of KV memory: never more than there is, and what is guaranteed comes back soon."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ryzanstein.worker.agent.memory.kv_shares import ROUNDS_REMEMBERED, KvMember, KvShares, KvUse


class Node:
    """Engines that obey limits after `delay` rounds, and the ledger above them."""

    def __init__(self, delay: int = 0) -> None:
        self.shares = KvShares()
        self.delay = delay
        self.members: dict[str, KvMember] = {}
        self.limits: dict[str, int] = {}
        self.late: dict[str, tuple[int, int]] = {}  # rounds left, the lower limit
        self.demand: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.dying: dict[str, int] = {}  # what lost ranks hold until they have ended

    def join(self, key: str, member: KvMember) -> None:
        self.members[key] = member
        self.limits[key] = self.sent[key] = self.shares.join(key, member)
        self.demand.setdefault(key, 0)
        self.late.pop(key, None)

    def lose(self, key: str) -> None:
        self.shares.lose(key)
        self.late.pop(key, None)
        self.dying[key] = self.limits.pop(key)

    def free(self, key: str) -> None:
        self.shares.free(key)
        del self.dying[key]

    def leave(self, key: str) -> None:
        self.shares.leave(key)
        for known in (self.limits, self.late, self.dying, self.members):
            known.pop(key, None)

    def round(self) -> int:
        """Returns how many limits were sent."""
        for key, (left, limit) in list(self.late.items()):
            self.late[key] = (left - 1, limit)
            if left <= 0:
                self.limits[key] = limit
                del self.late[key]
        for key, limit in self.limits.items():
            held = min(self.demand[key], limit, self.late.get(key, (0, limit))[1])
            self.shares.report(key, KvUse(limit, held, self.demand[key] - held))
        sent = self.shares.round()
        for key, limit in sent.items():
            assert 1 <= limit <= self.members[key].max_blocks
            self.late.pop(key, None)
            if limit >= self.limits[key]:
                self.limits[key] = limit
            else:
                self.late[key] = (self.delay, limit)
        return len(sent)

    @property
    def used_bytes(self) -> int:
        held = self.limits | self.dying
        return sum(limit * self.members[key].block_bytes for key, limit in held.items())

    @property
    def total_bytes(self) -> int:
        return sum(member.own_bytes for member in self.members.values())


members = st.builds(
    lambda own, more, size, weight: KvMember(own, own + more, size, weight),
    st.integers(4, 300),
    st.integers(0, 600),
    st.integers(1, 9),
    st.sampled_from((0.5, 1.0, 4.0)),
)


class SharesMachine(RuleBasedStateMachine):
    """Models come, go, lose their ranks and change their demand; engines obey with a delay."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(delay=2)
        self.count = 0
        self.excess = 0

    @precondition(lambda self: len(self.node.members) < 4)
    @rule(member=members)
    def join(self, member) -> None:
        self.count += 1
        self.node.join(str(self.count), member)

    @precondition(lambda self: self.node.members)
    @rule(data=st.data())
    def leave(self, data) -> None:
        self.node.leave(data.draw(st.sampled_from(sorted(self.node.members))))
        self.excess = max(0, self.node.used_bytes - self.node.total_bytes)

    @precondition(lambda self: self.node.limits)
    @rule(data=st.data())
    def lose(self, data) -> None:
        self.node.lose(data.draw(st.sampled_from(sorted(self.node.limits))))

    @precondition(lambda self: self.node.dying)
    @rule(data=st.data())
    def lost_ranks_end(self, data) -> None:
        self.node.free(data.draw(st.sampled_from(sorted(self.node.dying))))

    @precondition(lambda self: set(self.node.members) - set(self.node.limits) - set(self.node.dying))
    @rule(data=st.data())
    def return_of_ranks(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.node.members) - set(self.node.limits) - set(self.node.dying))))
        self.node.join(key, self.node.members[key])

    @precondition(lambda self: self.node.limits)
    @rule(data=st.data(), blocks=st.integers(0, 900))
    def demand(self, data, blocks) -> None:
        self.node.demand[data.draw(st.sampled_from(sorted(self.node.limits)))] = blocks

    @rule(times=st.integers(1, 5))
    def rounds(self, times) -> None:
        for _ in range(times):
            self.node.round()
            used, total = self.node.used_bytes, self.node.total_bytes
            self.excess = min(self.excess, max(0, used - total))

    @invariant()
    def never_more_than_there_is(self) -> None:
        node = self.node
        least = sum(member.block_bytes for member in node.members.values())  # every engine keeps a block
        assert node.used_bytes <= node.total_bytes + self.excess + least
        for member in node.members.values():
            assert member.own_blocks >= 1

    @precondition(lambda self: self.node.limits and not self.node.dying)
    @rule(data=st.data())
    def what_is_guaranteed_comes_back(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.node.limits)))
        own = self.node.members[key].own_blocks
        self.node.demand[key] = max(own, self.node.demand[key])
        for _ in range(2 * (self.node.delay + 2)):
            self.node.round()
        assert self.node.limits[key] >= own
        self.excess = max(0, self.node.used_bytes - self.node.total_bytes)


TestShares = SharesMachine.TestCase
TestShares.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def pair(delay: int = 0) -> Node:
    node = Node(delay)
    for key in ("busy", "idle"):
        node.join(key, KvMember(160, 320, 10))
    return node


def test_waiting_work_borrows_what_another_model_does_not_need() -> None:
    node = pair()
    node.demand["busy"] = 1000
    for _ in range(3):
        node.round()
    assert node.limits == {"busy": 310, "idle": 10}, "all but the reserve of the idle model"
    assert node.shares.borrowed_bytes("busy") == node.shares.lent_bytes("idle") == 1500


@pytest.mark.parametrize("delay", [0, 3])
def test_an_owner_gets_its_own_back_within_two_rounds_of_the_borrowers_answer(delay) -> None:
    node = pair(delay)
    node.demand["busy"] = 1000
    for _ in range(delay + 3):
        node.round()
    assert node.limits["busy"] == 310
    node.demand["idle"] = 500
    for _ in range(delay + 2):
        node.round()
    assert node.limits == {"busy": 160, "idle": 160}


def test_nobody_lends_without_need() -> None:
    node = pair()
    node.demand["busy"] = 120
    assert sum(node.round() for _ in range(5)) == 0


def test_limits_do_not_follow_every_sequence() -> None:
    node = pair()
    sent = 0
    for i in range(100):
        node.demand["busy"] = 240 if i % 2 else 200
        sent += node.round()
    assert sent <= 6


def test_what_is_borrowed_returns_when_it_is_not_needed() -> None:
    node = pair()
    node.demand["busy"] = 300
    for _ in range(3):
        node.round()
    node.demand["busy"] = 0
    for _ in range(ROUNDS_REMEMBERED + 2):
        node.round()
    assert node.limits == {"busy": 160, "idle": 160}


def test_borrowers_share_by_weight() -> None:
    node = Node()
    node.join("idle", KvMember(1600, 1600, 1))
    node.join("high", KvMember(16, 3000, 1, weight=3.0))
    node.join("low", KvMember(16, 3000, 1, weight=1.0))
    node.demand |= {"high": 5000, "low": 5000}
    for _ in range(4):
        node.round()
    assert node.limits == {"idle": 100, "high": 16 + 1125, "low": 16 + 375}


def test_ranks_that_return_start_with_what_is_not_lent_and_soon_have_all() -> None:
    node = pair(delay=1)
    node.demand["busy"] = 1000
    for _ in range(5):
        node.round()
    node.lose("idle")
    node.free("idle")
    node.join("idle", node.members["idle"])
    assert node.limits["idle"] == 10
    node.demand["idle"] = 160
    for _ in range(4):
        node.round()
    assert node.limits["idle"] == 160


def test_what_lost_ranks_borrowed_is_lent_to_nobody_before_they_have_ended() -> None:
    node = pair()
    node.demand["busy"] = 1000
    for _ in range(3):
        node.round()
    node.lose("busy")
    node.demand["idle"] = 160
    assert sum(node.round() for _ in range(5)) == 0
    assert node.limits == {"idle": 10}
    node.free("busy")
    node.round()
    assert node.limits == {"idle": 160}


def test_memory_of_a_model_that_left_is_overdrawn_until_it_is_given_back() -> None:
    node = pair(delay=1)
    node.demand["busy"] = 1000
    for _ in range(5):
        node.round()
    node.leave("idle")
    assert node.shares.overdrawn_bytes == 1500
    for _ in range(3):
        node.round()
    assert node.shares.overdrawn_bytes == 0
    assert node.limits == {"busy": 160}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 5, 1, 1.0), "own_blocks 0 must be from 1"),
        ((6, 5, 1, 1.0), "own_blocks 6 must be from 1 to max_blocks"),
        ((5, 5, 0, 1.0), "block_bytes must be at least 1: 0"),
        ((5, 5, 1, float("nan")), "weight must be positive and finite: nan"),
    ],
)
def test_a_member_out_of_bounds_is_refused(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        KvMember(*values)
