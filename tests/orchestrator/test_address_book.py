"""Nodes know where the others are by what changed, whatever is lost, late or older."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.cluster import MemberAddresses, Node, NodeReport
from ryzanstein.orchestrator.state.members.address_book import AddressBook
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes

ADDRESSES = [f"10.0.0.{number}:1" for number in range(12)]


def book_of(members: set[str]) -> AddressBook:
    return AddressBook(lambda: [Node(f"node-{each}", each) for each in sorted(members)])


@dataclass
class Listener:
    """A node. Its beats are answered at once, and answers arrive later, in order; `takes` says whether it is a newer one."""

    name: str
    takes: bool
    now: float = 0.0
    known: KnownNodes = field(init=False)
    answers: list[MemberAddresses | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = KnownNodes(lambda cause: None, lambda: self.now)

    def beat(self, book: AddressBook, now: float) -> None:
        report = NodeReport(None, members_digest=self.known.digest, takes_member_changes=self.takes)
        self.answers.append(book.news(self.name, report, now))

    def receive(self) -> None:
        if self.answers and (answer := self.answers.pop(0)) is not None:
            assert self.takes or not answer.since, "an older node knows no changes"
            self.known.follow(answer)

    def members(self) -> set[str]:
        self.now += 100.0  # those that left are known for a minute
        return {each for each in ADDRESSES if each in self.known}


class World:
    """Two orchestrators, of which one leads, and three nodes. Each method is an event."""

    def __init__(self, members: set[str]) -> None:
        self.members, self.now = members, 0.0
        self._books = [book_of(members), book_of(members)]
        self._leader = 0
        self.nodes = [Listener("a", True), Listener("b", True), Listener("older", False)]

    def change(self, number: int) -> None:
        self.members ^= {ADDRESSES[number]}
        for book in self._books:
            book.changed()

    def lead(self, number: int) -> None:
        self._leader = number % 2

    def beat(self, number: int) -> None:
        self.now += 1.0
        self.nodes[number % 3].beat(self._books[self._leader], self.now)

    def receive(self, number: int) -> None:
        self.nodes[number % 3].receive()

    def lose(self, number: int) -> None:
        self.nodes[number % 3].answers.clear()

    def restart(self, number: int) -> None:
        node = self.nodes[number % 3]
        self.nodes[number % 3] = Listener(node.name, node.takes)


EVENTS = st.tuples(
    st.sampled_from([World.change, World.change, World.beat, World.beat, World.receive, World.lose, World.restart, World.lead]),
    st.integers(0, len(ADDRESSES) - 1),
)


@settings(max_examples=60)
@given(st.sets(st.sampled_from(ADDRESSES), min_size=6), st.lists(EVENTS, max_size=40), st.sampled_from([0, 3, math.inf]))
def test_every_node_ends_with_the_addresses_of_all(members, events, short):
    """Beats overlap, answers are lost, nodes and leaders change: a change never applies to what it does not start from."""
    world, room = World(members), "ryzanstein.orchestrator.state.members.address_book."
    with patch(f"{room}_SHORT", short), patch(f"{room}_KEPT", 3):
        for event, number in events:
            event(world, number)
        for number, node in enumerate(world.nodes):
            for _ in range(len(node.answers)):
                world.receive(number)
            for _ in range(2):  # the first one may be of a change that the node ignores
                world.now += 1e6
                world.beat(number)
                world.receive(number)
            assert node.members() == world.members


def test_a_change_is_told_at_once_and_is_a_few_bytes_and_all_addresses_only_now_and_then():
    members = {f"10.1.{number // 250}.{number % 250}:1" for number in range(1000)}
    book = book_of(members)
    told = book.news("a", NodeReport(None, members_digest=b""), 0.0)
    assert told is not None
    assert len(told.addresses) == 1000
    members.add("10.9.9.9:1")
    book.changed()
    older, newer = (NodeReport(None, members_digest=told.digest, takes_member_changes=takes) for takes in (False, True))
    change = book.news("a", newer, 0.1)
    assert change is not None
    assert (change.addresses, change.removed, change.since) == (("10.9.9.9:1",), (), told.digest)
    assert book.news("a", older, 0.1) is None, "it was told all a moment ago"
    everything = book.news("a", older, 10.0)
    assert everything is not None
    assert len(everything.addresses) == 1001


def test_where_most_changed_all_are_told():
    members = {*ADDRESSES[:6]}
    book = book_of(members)
    told = book.news("a", NodeReport(None, members_digest=b"", takes_member_changes=True), 0.0)
    assert told is not None
    members.clear()
    members.update(ADDRESSES[6:])
    book.changed()
    news = book.news("a", NodeReport(None, members_digest=told.digest, takes_member_changes=True), 1.0)
    assert news is not None
    assert (news.since, set(news.addresses)) == (b"", members)
