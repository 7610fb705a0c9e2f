"""What a drain hands over: the newest turns of recent conversations, bounded."""

from __future__ import annotations

from ryzanstein.generation.request import NodePlace
from ryzanstein.worker.agent.pages.conversations import Chain, Conversations


def test_the_newest_turn_of_each_and_the_newest_first(scope) -> None:
    it, place = Conversations(max_keys=10), NodePlace("n", "a:1")
    for name in (b"one", b"two"):
        it.begin(name, Chain(scope, place))
        it.add(name, [name + b"-old"])
    it.begin(b"one", Chain(scope, place))
    it.add(b"one", [b"1", b"2"])
    it.add(b"unknown", [b"x"])
    assert [chain.keys for chain in it.newest_first()] == [[b"1", b"2"], [b"two-old"]]


def test_the_least_recent_is_forgotten_when_there_are_too_many_keys(scope) -> None:
    it, place = Conversations(max_keys=4), NodePlace("n", "a:1")
    for name in (b"one", b"two", b"three"):
        it.begin(name, Chain(scope, place))
        it.add(name, [name, name])
    assert [chain.keys[0] for chain in it.newest_first()] == [b"three", b"two"]
    it.clear()
    assert list(it.newest_first()) == []


def test_turns_that_are_too_short_for_a_page_are_bounded_too(scope) -> None:
    it, place = Conversations(max_chains=3), NodePlace("n", "a:1")
    for number in range(100):
        it.begin(bytes([number]), Chain(scope, place))
    assert len(list(it.newest_first())) == 3
