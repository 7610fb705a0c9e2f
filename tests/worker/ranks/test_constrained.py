"""Groups whose grammars are compiled beside the steps of others."""

from __future__ import annotations

import time

from ryzanstein.constraints import Constraint
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.constraints.cache import Grammars
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.engine.memory.prefix import scope_root
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.ranks.constrained import ConstrainedGroups, Prepared
from ryzanstein.worker.text.grammars.tokens import token_table
from ryzanstein.worker.text.tokenizer import TextModel


def group(number: int, constraint: Constraint, *generated: list[int], cache_root: bytes = b"") -> SubmitGroup:
    return SubmitGroup(
        group=number,
        prompt_ids=[1],
        sampling=SamplingParams(n=len(generated), constraint=constraint),
        max_tokens=8,
        stop_token_ids=[],
        generated=list(generated),
        finished=[False] * len(generated),
        cache_root=cache_root,
    )


def prepared(groups: ConstrainedGroups) -> list[Prepared]:
    found: list[Prepared] = []
    while groups.waiting:
        found += groups.ready()
        time.sleep(0.001)
    return found


def test_each_choice_follows_the_tokens_of_earlier_attempts(text_model: TextModel) -> None:
    table = token_table(text_model)
    a = table.tokens.index(b"a")
    groups = ConstrainedGroups(Grammars(2**20), StepMasks(len(table.tokens), 1))
    groups.know(table.encode())
    groups.take(group(1, Constraint.regex("aab?"), [], [a], [a, a, a]))
    groups.take(group(2, Constraint.regex("("), []))
    groups.take(group(3, Constraint.regex("c"), []))
    groups.cancel(3)
    (first, states), (second, error) = prepared(groups)
    assert (first.group, second.group) == (1, 2)
    assert isinstance(states, list)
    assert [bool(state.failure) for state in states] == [False, False, True]
    assert isinstance(error, RyzansteinError)
    assert "could not compile" in error.message


def test_what_is_cancelled_before_its_turn_is_not_compiled(text_model: TextModel) -> None:
    table = token_table(text_model)
    groups = ConstrainedGroups(Grammars(2**20), StepMasks(len(table.tokens), 1))
    groups.know(table.encode())
    for number in range(50):
        groups.take(group(number, Constraint.regex(f"(a{number}|b)" + "{20,40}"), []))
    for number in range(49):
        groups.cancel(number)
    ((last, states),) = prepared(groups)
    assert last.group == 49
    assert isinstance(states, list)
    assert groups.stats().grammar_misses < 25


def test_a_grammar_is_compiled_once_for_all_who_wait(text_model: TextModel) -> None:
    table = token_table(text_model)
    groups = ConstrainedGroups(Grammars(2**20), StepMasks(len(table.tokens), 1))
    groups.know(table.encode())
    for number in range(5):
        groups.take(group(number, Constraint.regex("aab?"), []))
    assert len(prepared(groups)) == 5
    assert (groups.stats().grammar_hits, groups.stats().grammar_misses) == (4, 1)


def test_a_grammar_that_another_scope_compiled_is_compiled_again(text_model: TextModel) -> None:
    table = token_table(text_model)
    groups = ConstrainedGroups(Grammars(2**20), StepMasks(len(table.tokens), 1))
    groups.know(table.encode())
    counts = []
    for number, scope in enumerate(("", "a", "b", "a", "")):
        groups.take(group(number, Constraint.regex("aab?"), [], cache_root=scope_root(scope)))
        assert len(prepared(groups)) == 1
        counts.append((groups.stats().grammar_hits, groups.stats().grammar_misses))
    assert counts == [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]
