"""The questions of the clients: one kind of request for each thing that a failover can get wrong.

Plain data.

All of them are long enough to be struck in the middle, and have one right answer: greedy, or with a
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.clients.forms import CallForm, ObjectForm
from ryzanstein.lab.clients.question import LoadQuestion

_COUNT = "Count from 1 to 100."
_GREEDY = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True, "logprobs": 2}

QUESTIONS: tuple[LoadQuestion, ...] = (
    LoadQuestion("greedy", (_COUNT,), _GREEDY),
    LoadQuestion(
        "sampled",
        ("Count from 1 to 60.",),
        {
            "temperature": 0.8,
            "top_p": 0.95,
            "seed": 2026,
            "repetition_penalty": 1.05,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.1,
            "min_tokens": 40,
            "max_tokens": 400,
            "ignore_eos": True,
            "logprobs": 1,
        },
    ),
    LoadQuestion("n3", (_COUNT,), {"temperature": 0.7, "seed": 7, "n": 3, "max_tokens": 200, "ignore_eos": True}),
    LoadQuestion("stop", (_COUNT,), {"temperature": 0.0, "stop": ["88 89", "88, 89"]}),
    LoadQuestion(
        "session",
        ("Hello, my name is Zorvia.", "I live in Quenlo.", _COUNT, "What is my name?", "Where do I live?"),
        {"temperature": 0.0, "max_tokens": 200},
    ),
    LoadQuestion("sse", (_COUNT,), _GREEDY, face="sse"),
    LoadQuestion("websocket", (_COUNT,), {**_GREEDY, "n": 2}, face="websocket"),
)

# Servers of others go on exactly with greedy answers alone, and lack more than that.
_ENDS = {"temperature": 0.0, "max_tokens": 400}
_SHOWN = {**_ENDS, "logprobs": 1}  # the two faces ask for them
SERVER_QUESTIONS: tuple[LoadQuestion, ...] = (
    LoadQuestion("greedy", (_COUNT,), _ENDS),
    *(question for question in QUESTIONS if question.kind in ("stop", "session")),
    LoadQuestion("sse", (_COUNT,), _SHOWN, face="sse"),
    LoadQuestion("websocket", (_COUNT,), {**_SHOWN, "n": 2}, face="websocket"),
)

# A model with random weights need not end an answer, so these have a length. It also writes parts of
# characters. Over HTTP their log probabilities come later than their indices, so a client cannot
# check each index there.
_OF_ANY_MODEL = tuple(question for question in QUESTIONS if question.kind in ("greedy", "sampled", "n3"))


def questions_to(first: str, further: Sequence[str]) -> tuple[LoadQuestion, ...]:
    """Returns the questions where nodes serve several models: all to the first, some to each other."""
    to_others = (question.to(model) for model in further for question in _OF_ANY_MODEL)
    return (*(replace(question, model=first) for question in QUESTIONS), *to_others)


def questions_to_adapters(adapters: Sequence[str]) -> tuple[LoadQuestion, ...]:
    """Returns the questions where a model has adapters: all to the model, some to each adapter, in one batch."""
    to_adapters = [question.to(name) for name in adapters for question in QUESTIONS if question.kind in ADAPTED_KINDS]
    return (*(replace(question, model=MODEL_DIR.name) for question in QUESTIONS), *to_adapters)


ADAPTED_KINDS = ("greedy", "sampled", "n3", "session")
_LONG_S = 300.0
_LONG_GREEDY = {**_GREEDY, "max_tokens": 1000}
LONG_QUESTIONS: tuple[LoadQuestion, ...] = (
    LoadQuestion("long-greedy", (_COUNT,), _LONG_GREEDY, call_s=_LONG_S),
    LoadQuestion("long-sampled", (_COUNT,), {**_LONG_GREEDY, "temperature": 0.7, "top_p": 0.95, "seed": 12}, call_s=_LONG_S),
    LoadQuestion("long-sse", (_COUNT,), _LONG_GREEDY, face="sse", call_s=_LONG_S),
    LoadQuestion("long-websocket", (_COUNT,), _LONG_GREEDY, face="websocket", call_s=_LONG_S),
)


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _list(item: dict[str, Any], length: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": length, "maxItems": length}


# Whole characters only, like all answers that are read over HTTP.
_WORD = {"type": "string", "pattern": "^[a-z]{6,9}$"}
_ENTRY = _schema({"word": _WORD, "count": {"type": "integer", "minimum": 0, "maximum": 9999}})
_OBJECT = ObjectForm(_schema({"entries": _list(_ENTRY, 10), "done": {"type": "boolean"}}))
_FUNCTIONS = {"store": _schema({"entries": _list(_ENTRY, 8)}), "note": _schema({"words": _list(_WORD, 24)})}
_DRAWN = {"temperature": 1.0, "seed": 18, "max_tokens": 1200, "logprobs": 1}

FORM_QUESTIONS: tuple[LoadQuestion, ...] = (
    LoadQuestion("object", (_COUNT,), _DRAWN, form=_OBJECT),
    LoadQuestion("object-n2", (_COUNT,), {**_DRAWN, "n": 2}, form=_OBJECT),
    LoadQuestion("object-session", ("Hello, my name is Zorvia.", "What is my name?"), _DRAWN, form=_OBJECT),
    LoadQuestion("object-sse", (_COUNT,), _DRAWN, face="sse", form=_OBJECT),
    LoadQuestion("object-websocket", (_COUNT,), {**_DRAWN, "n": 2}, face="websocket", form=_OBJECT),
    LoadQuestion("call", (_COUNT,), _DRAWN, form=CallForm(_FUNCTIONS)),
    LoadQuestion("call-named", (_COUNT,), _DRAWN, form=CallForm(_FUNCTIONS, "note")),
    LoadQuestion("call-sse", (_COUNT,), _DRAWN, face="sse", form=CallForm(_FUNCTIONS)),
    LoadQuestion("call-websocket", (_COUNT,), _DRAWN, face="websocket", form=CallForm(_FUNCTIONS)),
    *(question for question in QUESTIONS if question.kind == "websocket"),
)


def long_prompt(number: int) -> LoadQuestion:
    """Returns a question whose prompt has many hundred tokens.

    No node has it in its cache, so it needs memory. Each number gives a different one.
    """
    words = f"I am number {number}. " + "I live in Quenlo and I have a dog called Biscuit. " * 90
    return LoadQuestion(f"long-{number}", (f"{words}{_COUNT}",), {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True})


# Beside prompts that take a minute.
PATIENT_QUESTIONS = tuple(replace(question, call_s=_LONG_S) for question in _OF_ANY_MODEL)


def context_question(name: str, number: int, num_tokens: int, turns: int = 1) -> LoadQuestion:
    """Returns a question after about so many tokens that no other one has, in a session if it has more turns."""
    words = "".join(f"{(i * 7919 + number * 104729) % 9973:04d} " for i in range(num_tokens // 5))
    more = tuple(f"{_COUNT} Again, {turn}." for turn in range(1, turns))
    sampling = {"temperature": 0.7, "seed": number, "max_tokens": 200, "ignore_eos": True, "logprobs": 1}
    return LoadQuestion(f"{name}-{number}", (f"I am {name} {number}. {words}{_COUNT}", *more), sampling, call_s=_LONG_S)
