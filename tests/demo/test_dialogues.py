"""Dialogues: a function of split and seed, with answers that follow from what was told."""

import re
from itertools import pairwise

import pytest

from ryzanstein.lab.demo.dialogues import MAX_COUNT, Dialogue, DialogueTurn, Mix, dialogue
from ryzanstein.lab.demo.phrases import ANIMALS, NAME, SLOTS
from ryzanstein.lab.demo.words import Split


def many(split: Split = Split.TRAIN, mix: Mix | None = None) -> list[Dialogue]:
    return [dialogue(split, seed, mix) for seed in range(300)]


def turns(kind: str, mix: Mix | None = None) -> list[DialogueTurn]:
    found = [turn for one in many(mix=mix) for turn in one.turns if turn.kind == kind]
    assert found
    return found


def test_a_dialogue_depends_on_split_and_seed_only() -> None:
    assert many() == many()
    assert dialogue(Split.TRAIN, 7) != dialogue(Split.HELD_OUT, 7)
    assert dialogue(Split.TRAIN, 7) != dialogue(Split.TRAIN, 8)


def test_stated_names_of_the_two_splits_are_disjoint() -> None:
    assert not stated_names(Split.TRAIN) & stated_names(Split.HELD_OUT)


def stated_names(split: Split) -> set[str]:
    answers = [turn.assistant for one in many(split) for turn in one.turns]
    names = re.findall(r"Nice to meet you, ([^.]+)\.", " ".join(answers))
    assert len(names) > 100
    return {part.lower() for name in names for part in name.split()}


def test_dialogues_have_at_most_the_turns_of_their_mix() -> None:
    assert {len(one.turns) for one in many(mix=Mix(max_turns=3))} == {1, 2, 3}


def test_every_kind_of_turn_comes_up() -> None:
    kinds = {turn.kind for one in many() for turn in one.turns}
    recalls = {f"recall {slot.kind}" for slot in SLOTS}
    assert kinds == recalls | {"tell", "not told", "two questions", "repeat", "count", "talk"}


def test_a_recalled_value_was_said_before_and_the_newest_one_wins() -> None:
    for one in many():
        name = None
        for turn in one.turns:
            stated = re.search(r"Nice to meet you, ([^.]+)\.", turn.assistant)
            name = stated[1] if stated else name
            if turn.kind == "recall name":
                assert name is not None
                assert turn.assistant == NAME.answer.format(name)


def test_a_pet_may_be_any_animal_that_was_announced() -> None:
    pet, dog = ANIMALS[0], ANIMALS[1]
    answers = {
        turn.assistant.split(" is called")[0]
        for one in many(mix=Mix(count=0, repeat=0, talk=0))
        for turn in one.turns
        if turn.kind == "recall pet" and re.search(r"\bpet\b", turn.user)
    }
    assert {pet.answer.split(" is called")[0], dog.answer.split(" is called")[0]} <= answers


def test_what_was_unknown_is_answered_so() -> None:
    assert {turn.assistant for turn in turns("not told")} == {slot.unknown for slot in SLOTS}


def test_a_count_names_every_number_once_in_order() -> None:
    for turn in turns("count", Mix(count=1, long_counts=0.5)):
        asked = [int(number) for number in re.findall(r"\d+", turn.user)]
        counted = [int(number) for number in turn.assistant.split()]
        assert counted[-1] == asked[-1] <= MAX_COUNT
        assert counted[0] == (asked[0] if len(asked) == 2 else 1)
        assert all(after == before + 1 for before, after in pairwise(counted))


def test_a_repeat_ends_with_what_is_to_be_repeated() -> None:
    assert all(turn.user.endswith(f": {turn.assistant}") for turn in turns("repeat"))


@pytest.mark.parametrize("seed", range(20))
def test_messages_alternate_after_an_optional_system_message(seed: int) -> None:
    one = dialogue(Split.TRAIN, seed)
    roles = [message["role"] for message in one.messages()]
    expected = ["user", "assistant"] * len(one.turns)
    assert roles == (["system", *expected] if one.system else expected)
