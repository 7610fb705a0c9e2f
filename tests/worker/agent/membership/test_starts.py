"""The numbers by which an orchestrator sees whether starts move."""

from ryzanstein.worker.agent.membership.deployed import StartNumbers


def test_a_number_grows_whenever_something_else_is_seen_and_stands_still_otherwise():
    numbers = StartNumbers()
    first = numbers.look({"m": ("load", 1), "n": ("load", 1)})
    assert numbers.look({"m": ("load", 1), "n": ("load", 1)}) == first
    second = numbers.look({"m": ("load", 2), "n": ("load", 1)})
    assert second["m"] > first["m"]
    assert second["n"] == first["n"]


def test_a_start_that_ended_and_begins_again_has_a_new_number():
    numbers = StartNumbers()
    before = numbers.look({"m": "same"})["m"]
    assert numbers.look({}) == {}
    assert numbers.look({"m": "same"})["m"] > before
