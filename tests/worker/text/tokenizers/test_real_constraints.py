"""Constraints and forced calls on real vocabularies: whatever is drawn from the masks is valid, read back from its ids."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.worker.constraints.random_schemas import random_schema

from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.request import SamplingParams
from ryzanstein.generation.tools import Tool, ToolMode, Tools
from ryzanstein.replies.format import reply_format
from ryzanstein.replies.reader import read_message
from ryzanstein.replies.source import MAX_HELD_CHARS
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.constraints.matching import Bits, GrammarState
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.text.call_grammar import call_constraint
from ryzanstein.worker.text.grammars.tokens import token_table

from .conftest import Real

pytestmark = pytest.mark.lab

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = Tools((Tool("weather", "Of a city.", json.dumps(WEATHER)), Tool("now")), ToolMode.REQUIRED, parallel=False)


class Drawing:
    """Answers of tokens that are drawn from the masks of one vocabulary."""

    def __init__(self, real: Real) -> None:
        self._model = real.model
        self._table = token_table(real.model)
        self._tokenizer, self._bits = self._table.tokenizer(), Bits(self._table)
        self._masks = StepMasks(len(self._table.tokens), 1)

    def drawn(self, constraint: Constraint, seed: int, most: int = 600) -> str | None:
        """The text of an answer as it is streamed, special tokens by name; None: it has no end by then."""
        state = GrammarState(compiled(constraint, self._table, self._tokenizer), self._bits, ())
        follows, rng, text = self._model.vocabulary(with_special=True).detokenizer(), random.Random(seed), ""
        for _ in range(most):
            token_id = self._one(state, rng)
            state.accept(token_id)
            assert not state.failure
            if token_id in self._table.eos:
                return text + follows.flush()
            text += follows.push(token_id)
            if state.finished:
                return text + follows.flush()
        return None

    def _one(self, state: GrammarState, rng: random.Random) -> int:
        self._masks.begin([SampleRow(SamplingParams(), 0, 0, [], [], (), (), constraint=state)])
        words = self._masks.wait()
        assert words is not None
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=len(self._table.tokens))[0]
        return int(rng.choice(np.flatnonzero(bits)))


@pytest.fixture(scope="module")
def drawing(real: Real) -> Drawing:
    return Drawing(real)


def test_answers_to_schemas_are_valid(drawing: Drawing) -> None:
    ended = 0
    for seed in range(20):
        schema = random_schema(seed)
        text = drawing.drawn(Constraint.json_schema(json.dumps(schema)), seed)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended > 15


def test_choices_and_matches_are_whole(drawing: Drawing) -> None:
    words = ["yes", "no", "perhaps\nnot", "日本"]
    assert {drawing.drawn(Constraint.choice(words), seed) for seed in range(40)} == set(words)
    for seed in range(5):
        text = drawing.drawn(Constraint.regex("[a-c]{2,4}\\n- (x|y)"), seed)
        assert text is not None
        assert text[-4:] in ("\n- x", "\n- y")


def test_forced_calls_are_read_back(real: Real, drawing: Drawing) -> None:
    prompt = ChatPrompt((Message(Role.USER, "Rome?"),), tools=TOOLS)
    style = real.model.calling_of(prompt).style(prompt, "")
    assert style is not None
    constraint = call_constraint(TOOLS, ReplyStyle(style.calls), real.model.special_id)
    for seed in range(20):
        text = drawing.drawn(constraint, seed)
        assert text is not None
        assert len(text) < MAX_HELD_CHARS
        (call,) = read_message(reply_format(prompt, style), "g", 0, text).tool_calls
        assert call.name in ("weather", "now")
        if call.name == "weather":
            jsonschema.validate(json.loads(call.arguments), WEATHER)
