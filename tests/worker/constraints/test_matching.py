"""Masks against their definition: a token is allowed exactly if the answer with it can still be completed."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from tests.worker.constraints.random_schemas import random_schema

from ryzanstein.constraints import Constraint
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.constraints.matching import MOST_BLANKS, MOST_TOKEN_S, Bits, GrammarState, TokenPatience
from ryzanstein.worker.constraints.refusal import Cause, ConstraintRefused
from ryzanstein.worker.constraints.table import TokenTable
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.text.grammars.tokens import token_table
from ryzanstein.worker.text.tokenizer import TextModel


def unpacked(words_SW: npt.NDArray[np.uint32], vocab_size: int) -> npt.NDArray[np.uint8]:
    return np.unpackbits(words_SW.view(np.uint8), axis=1, bitorder="little", count=vocab_size)


class Tokens:
    """The demo model's tokens, and grammars for them."""

    def __init__(self, table: TokenTable) -> None:
        self.table, self.tokenizer, self.bits = table, table.tokenizer(), Bits(table)
        self.masks = StepMasks(len(table.tokens), 1)

    def state(self, constraint: Constraint, generated: tuple[int, ...] = (), **more: Any) -> GrammarState:
        return GrammarState(compiled(constraint, self.table, self.tokenizer), self.bits, generated, **more)

    def allowed(self, state: GrammarState, banned: tuple[int, ...] = (), only: tuple[int, ...] = ()) -> list[int]:
        self.masks.begin([SampleRow(SamplingParams(), 0, 0, [], [], banned, only, constraint=state)])
        words = self.masks.wait()
        assert words is not None
        return [int(i) for i in np.flatnonzero(unpacked(words, len(self.table.tokens))[0])]

    def draw(self, state: GrammarState, seed: int, most: int = 400) -> tuple[str, bool]:
        """An answer of uniformly drawn tokens, and whether it ended."""
        rng, text = random.Random(seed), b""
        for _ in range(most):
            token_id = rng.choice(self.allowed(state))
            state.accept(token_id)
            assert not state.failure
            if token_id not in self.table.special:
                text += self.table.tokens[token_id]
            if state.finished or token_id in self.table.eos:
                return text.decode(), True
        return text.decode("utf-8", "replace"), False

    def ids(self, text: str) -> list[int]:
        return [self.table.tokens.index(bytes([byte])) for byte in text.encode()]


@pytest.fixture(scope="module")
def tokens(text_model: TextModel) -> Tokens:
    return Tokens(token_table(text_model))


def test_the_table_has_what_the_detokenizer_writes(text_model: TextModel, tokens: Tokens) -> None:
    table = TokenTable.decode(tokens.table.encode())
    assert len(table.tokens) == text_model.vocab_size
    for text in ("Hello, wörld!", "1 2 3\n", '{"a": [true]}'):
        ids = text_model.encode(text)
        assert b"".join(table.tokens[token_id] for token_id in ids) == text.encode()
    assert set(table.eos) <= set(table.special)
    assert table.special_id("<|user|>") == text_model.encode("<|user|>")[0]


def test_answers_of_random_tokens_satisfy_their_schemas(tokens: Tokens) -> None:
    num_ended = 0
    for seed in range(60):
        schema = random_schema(seed)
        text, ended = tokens.draw(tokens.state(Constraint.json_schema(json.dumps(schema))), seed)
        num_ended += ended
        if ended:
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    assert num_ended >= 55


PATTERNS = ["[0-9]{3}-[a-f]{1,4}", "(yes|no|maybe)!?", "a/b\\d\\w\\s?", "^x+$", "é{2}", "(?i)ab", "[\\r\\n]x"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_answer_matches_its_regular_expression(tokens: Tokens, pattern: str) -> None:
    for seed in range(5):
        text, ended = tokens.draw(tokens.state(Constraint.regex(pattern)), seed, most=40)
        assert not ended or re.fullmatch(pattern, text, re.ASCII)


def test_an_answer_is_one_of_the_alternatives(tokens: Tokens) -> None:
    alternatives = ("yes", "yes and no", 'a "b" \\ c', "two\nlines", "é")
    texts = {tokens.draw(tokens.state(Constraint.choice(alternatives)), seed)[0] for seed in range(60)}
    assert texts <= set(alternatives)
    assert len(texts) > 3


def test_the_mask_is_exactly_what_the_grammar_accepts(tokens: Tokens) -> None:
    constraint = Constraint.json_schema(json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}))
    for prefix in ("", "[", "[t", "[true", "[true,", "[true,false,true"):
        state = tokens.state(constraint, tuple(tokens.ids(prefix)))
        allowed = set(tokens.allowed(state))
        for token_id in range(len(tokens.table.tokens)):
            accepted = state.matcher.deep_copy().consume_token(token_id)
            assert accepted == (token_id in allowed), (prefix, tokens.table.tokens[token_id])


def test_a_replayed_state_goes_on_as_the_first_one(tokens: Tokens) -> None:
    constraint = Constraint.json_schema(json.dumps(random_schema(3)))
    rng, state, generated = random.Random(1), tokens.state(constraint), []
    for _ in range(60):
        allowed = tokens.allowed(state)
        assert tokens.allowed(tokens.state(constraint, tuple(generated))) == allowed
        generated.append(rng.choice(allowed))
        state.accept(generated[-1])
        assert tokens.state(constraint, tuple(generated)).finished == state.finished
        if state.finished:
            return


def test_special_tokens_are_never_a_part_of_text(tokens: Tokens) -> None:
    allowed = tokens.allowed(tokens.state(Constraint.regex("(?s:.+)")))
    assert not set(allowed) & set(tokens.table.special)
    assert tokens.allowed(tokens.state(Constraint.grammar("start: <|user|> /x/"))) == [tokens.table.special_id("<|user|>")]


def test_the_end_is_allowed_only_where_the_answer_is_complete(tokens: Tokens) -> None:
    end = tokens.table.eos[0]
    assert end not in tokens.allowed(tokens.state(Constraint.regex("a{2,}"), tuple(tokens.ids("a"))))
    assert end in tokens.allowed(tokens.state(Constraint.regex("a{2,}"), tuple(tokens.ids("aa"))))
    assert tokens.state(Constraint.regex("a{2}"), tuple(tokens.ids("aa"))).finished


def test_banned_stops_and_ignored_ends_give_way_only_where_nothing_else_is_left(tokens: Tokens) -> None:
    end = tokens.table.eos[0]
    goes_on = Constraint.regex("a{2,}")
    two = tuple(tokens.ids("aa"))
    assert end not in tokens.allowed(tokens.state(goes_on, two), banned=(end,))
    assert end not in tokens.allowed(tokens.state(goes_on, two, keeps_on=True))
    only_end = Constraint.grammar("start: A\nA: /a{2,3}/ & /aa/")
    state = tokens.state(only_end, tuple(tokens.ids("aa")))
    assert state.finished or tokens.allowed(state, banned=(end,)) == [end]


def test_a_request_may_allow_fewer_tokens_but_not_none(tokens: Tokens) -> None:
    state = tokens.state(Constraint.regex("[0-9]+"))
    only = tuple(tokens.ids("1a"))
    assert tokens.allowed(state, only=only) == tokens.ids("1")
    assert not state.failure
    tokens.allowed(state, only=tuple(tokens.ids("a")))
    assert "allowed_token_ids" in state.failure


def test_white_space_alone_does_not_go_on_for_ever(tokens: Tokens) -> None:
    constraint = Constraint.grammar('start: WS "x"\nWS: /[ \\n]*/')
    blank = tokens.ids(" ")[0]
    assert blank in tokens.allowed(tokens.state(constraint, (blank,) * (MOST_BLANKS - 1)))
    state = tokens.state(constraint, (blank,) * MOST_BLANKS)
    assert tokens.allowed(state) == tokens.ids("x")
    assert state.num_broken == 1
    needs = Constraint.regex(f" {{{MOST_BLANKS + 5}}}x")
    assert blank in tokens.allowed(tokens.state(needs, (blank,) * MOST_BLANKS))


def test_json_has_little_white_space(tokens: Tokens) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    one = Constraint.json_schema(json.dumps(schema))
    assert not tokens.state(one, tuple(tokens.ids('{ "a": 1}'))).failure
    assert not tokens.state(one, tuple(tokens.ids('{\n  "a": 1\n}'))).failure
    for spaced in ('{  "a": 1}', '{\n\n"a": 1}', "{\n" + 13 * " " + '"a": 1}', ' {"a": 1}'):
        assert tokens.state(one, tuple(tokens.ids(spaced))).failure, spaced


@pytest.mark.parametrize("marker", ["</think>", "<|user|>"])
def test_a_constraint_may_begin_after_a_marker(tokens: Tokens, marker: str) -> None:
    constraint = replace(Constraint.regex("[0-9]{2}"), after=marker)
    special = tokens.table.special_id(marker)
    end_of_thought = [special] if special is not None else tokens.ids(marker)
    thinking = tokens.state(constraint, tuple(tokens.ids("well, 9 {")))
    assert len(tokens.allowed(thinking)) > 900
    assert tokens.table.eos[0] not in tokens.allowed(thinking)
    answering = tokens.state(constraint, (*tokens.ids("well, 9 {"), *end_of_thought))
    texts = {tokens.table.tokens[token_id].decode() for token_id in tokens.allowed(answering)}
    assert texts
    assert all(re.fullmatch("[0-9]{1,2}", text) for text in texts)
    assert tokens.state(constraint, (*end_of_thought, *tokens.ids("42"))).finished


def test_a_step_of_many_rows_has_each_rows_own_mask(tokens: Tokens) -> None:
    constraints = [Constraint.regex(f"{letter}+") for letter in "abcdefgh"]
    states = [tokens.state(constraint) for constraint in constraints]
    rows = [SampleRow(SamplingParams(), 0, 0, [], [], constraint=state) for state in states]
    rows.insert(3, SampleRow(SamplingParams(), 0, 0, [], []))
    tokens.masks.begin(rows)
    words = tokens.masks.wait()
    assert words is not None
    flags = unpacked(words, len(tokens.table.tokens))
    assert flags[3].all()
    for letter, row in zip("abcdefgh", np.delete(flags, 3, axis=0), strict=True):
        texts = {tokens.table.tokens[i] for i in np.flatnonzero(row)}
        assert texts
        assert all(set(text.decode()) == {letter} for text in texts)
    assert tokens.masks.wait() is None


def test_a_step_that_was_given_up_leaves_nothing_to_the_next(tokens: Tokens) -> None:
    states = [tokens.state(Constraint.regex(f"{letter}+")) for letter in "abcdefgh"]
    tokens.masks.begin([SampleRow(SamplingParams(), 0, 0, [], [], constraint=state) for state in states])
    assert {tokens.table.tokens[i] for i in tokens.allowed(tokens.state(Constraint.regex("z")))} == {b"z"}


def test_a_step_without_constraints_has_no_masks(tokens: Tokens) -> None:
    tokens.masks.begin([SampleRow(SamplingParams(), 0, 0, [], [])])
    assert tokens.masks.wait() is None


def test_tokens_that_break_the_constraint_are_a_failure(tokens: Tokens) -> None:
    state = tokens.state(Constraint.regex("[0-9]+"), tuple(tokens.ids("12x")))
    assert "does not satisfy" in state.failure
    assert not state.finished
    assert len(tokens.allowed(state)) == len(tokens.table.tokens)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"properties": {"a": {"items": {"type": "string", "pattern": "("}}, "b": {}}}, "#/properties/a/items"),
        ({"anyOf": [{}, {"type": "integer", "minimum": 5, "maximum": 1}]}, ""),
        ({"allOf": [{"type": "integer", "minimum": 5, "maximum": 1}]}, "#/allOf/0"),
        ({"$defs": {"x/y": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "$ref": "#/$defs/x~1y"}, "#/$defs/x~1y"),
        ({"$ref": "#/nowhere"}, "#"),
        ({"const": "\ud800"}, "#"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_llguidance_refuses_is_refused_with_its_path(tokens: Tokens, schema: Any, where: str) -> None:
    constraint = Constraint.json_schema(json.dumps(schema))
    if not where:
        assert not tokens.state(constraint).failure  # another alternative is left
        return
    with pytest.raises(ConstraintRefused) as refused:
        tokens.state(constraint)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("lark", "says"),
    [
        ("start: undefined", "undefined"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
        ('start: %json {"not": {"type": "null"}}', "'not'"),
        ("start: %json {", "not JSON"),
        ("start: @other", "other"),
        ("", "start"),
        ("start: start", "no answer"),
        ('start: <|nosuch|> "a"', "nosuch"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(tokens: Tokens, lark: str, says: str) -> None:
    with pytest.raises(ConstraintRefused, match=re.escape(says)):
        tokens.state(Constraint.grammar(lark))


def test_a_grammar_may_embed_schemas(tokens: Tokens) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}
    lark = f'start: "%json {{}}" call // %json {{"not": 1}}\ncall: %json {json.dumps(schema)}'
    text, ended = tokens.draw(tokens.state(Constraint.grammar(lark)), 1)
    assert ended
    assert text.startswith("%json {}")
    assert json.loads(text.removeprefix("%json {}"))["a"] in (1, 2)


HOSTILE = "start: /[a-z]{9}/ a\na: " + " | ".join("a " * k for k in range(2, 30)) + ' | /[a-z ]/ | ""'


def test_a_grammar_whose_tokens_take_long_fails_soon(tokens: Tokens) -> None:
    state, began = tokens.state(Constraint.grammar(HOSTILE)), time.process_time()
    for _ in range(24):
        tokens.allowed(state)
        state.accept(ord("a"))
    assert state.failure
    assert time.process_time() - began < 2


def test_choices_of_one_group_are_slow_only_once(tokens: Tokens) -> None:
    moves: list[int] = []
    patience = TokenPatience(lambda: moves.append(1))
    first, second = (tokens.state(Constraint.json_object(), patience=patience) for _ in range(2))
    patience.spent(2 * MOST_TOKEN_S)
    for state in (first, second):
        tokens.allowed(state)
        assert state.failure == "the constraint takes too long for each token"
    assert len(moves) == 1


def test_an_object_with_too_many_optional_properties_is_refused_at_once(tokens: Tokens) -> None:
    schema = {"type": "object", "properties": {f"property_{i}": {"type": "integer"} for i in range(900)}}
    with pytest.raises(ConstraintRefused) as refusal:
        tokens.state(Constraint.json_schema(json.dumps(schema)))
    assert refusal.value.cause is Cause.SIZE
