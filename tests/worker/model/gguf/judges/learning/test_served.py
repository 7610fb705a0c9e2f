"""A real model that learned a format: what its cluster answers without the adapter, with it, on two ranks, and merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.gguf.judges.learning.conftest import ADAPTER, Heard, LearnedModel, Talk
from tests.worker.model.gguf.judges.learning.facts import share, valid
from tests.worker.model.rank_processes import answers_of_ranks

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.tools.finetune.merging import merge
from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.adapters.reading import read_adapter
from ryzanstein.worker.engine.plan import StepPlan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3000)]


TIE = 0.3
"""Of two tokens whose log probabilities differ by less, either may be answered where sums are rounded otherwise."""


def assert_same_but_for_ties(found: list[Heard], expected: list[Heard]) -> None:
    off = [before.off(after) for before, after in zip(expected, found, strict=True)]
    same = share([each.text == other.text for each, other in zip(found, expected, strict=True)])
    print(f"{same:.0%} of the answers are the same, the others begin with a token that is {max(off):.2f} nat less likely")
    assert same >= 0.95
    assert max(off) < TIE


def test_a_served_model_answers_in_the_format_that_its_adapter_learned(learned: LearnedModel, talk: Talk) -> None:
    before, after = (share([valid(each.text) for each in heard]) for heard in (talk.alone, talk.adapted))
    right = share([heard.text.strip() == told for heard, told in zip(talk.adapted, talk.told, strict=True)])
    print(f"{learned.name}: valid {before:.0%} before, {after:.0%} after, {right:.0%} right; {talk.adapted[0].text!r}")
    assert before <= 0.05
    assert after >= 0.95


def test_the_base_answers_to_the_bit_as_before_while_an_adapter_is_in_its_batches(learned: LearnedModel, talk: Talk) -> None:
    """Texts, tokens and their log probabilities."""
    assert learned.name
    assert talk.beside == talk.alone


@pytest.mark.parametrize("learned", ["smollm2"], indirect=True)
def test_two_ranks_share_nine_heads_with_an_adapter(
    learned: LearnedModel, talk: Talk, runner: Callable[..., Any], tmp_path: Path
) -> None:
    """As `test_smollm2` compares them without one; the differences are those of sums in another order."""
    text = learned.text
    ids = [token for each in talk.asked[:5] for token in text.encode_chat([Message(Role.USER, each)])][:300]
    plan = StepPlan(1, ids, [len(ids)], [0], [list(range(20))], [0], full_logits=True, adapters=[(1, len(ids))])
    options = {"num_blocks": 32, "block_size": 16, "num_threads": 1, "max_tokens_per_step": 512}
    alone = runner(learned.file, **options)
    packed = tmp_path / "packed"
    pack(read_adapter(learned.adapter, alone.adaptable, learned.file), packed)
    alone.map_adapter(1, packed)
    expected = torch.log_softmax(alone.hidden_logits(plan).float()[-1], -1)
    answer = answers_of_ranks(tmp_path, 2, [(learned.file, options, [plan], {1: packed})])[0]["jobs"][0]
    found = torch.log_softmax(answer["answers"][0].float()[-1], -1)
    assert (expected.exp() * (expected - found)).sum() < 0.02
    assert int(found.argmax()) == int(expected.argmax())


@pytest.mark.parametrize("learned", ["smollm2"], indirect=True)
def test_two_ranks_answer_as_one(learned: LearnedModel, talk: Talk, serve: Callable[..., Any]) -> None:
    with serve(learned.spec(tp=2)) as model:
        model.add(learned.adapter)
        found = model.ask_all([(ADAPTER, each) for each in talk.asked])
    assert_same_but_for_ties(found, talk.adapted)


@pytest.mark.parametrize("learned", ["smollm2"], indirect=True)
def test_a_merged_model_answers_as_the_base_with_the_adapter(
    learned: LearnedModel, talk: Talk, serve: Callable[..., Any], tmp_path: Path
) -> None:
    merge(learned.file, learned.adapter, tmp_path / "merged", torch.float32)
    with serve(learned.spec(model=tmp_path / "merged")) as model:
        found = model.ask_all([(model.base, each) for each in talk.asked])
    assert_same_but_for_ties(found, talk.adapted)
