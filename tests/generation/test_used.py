"""What a request needs of an engine, by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ryzanstein.constraints import Constraint
from ryzanstein.errors import ENGINE_LACKS, Code
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TextPrompt
from ryzanstein.generation.request import NEVER_LACKING, GenerationRequest, SamplingParams
from ryzanstein.generation.tools import Tool, ToolMode, Tools

OTHER: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "seed": 0,
    "max_tokens": 1,
    "min_tokens": 1,
    "stop": ("x",),
    "stop_token_ids": (1,),
    "logit_bias": ((1, 1.0),),
    "logprobs": 0,
    "n": 2,
    "ignore_eos": True,
    "constraint": Constraint.regex("a"),
    "bad_words": ("x",),
    "allowed_token_ids": (1,),
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 0,
    "truncate_prompt_tokens": 1,
    "keep_prompt_head": 0,
}


def asked(**given: Any) -> GenerationRequest:
    return GenerationRequest("demo", TextPrompt("hello"), SamplingParams(**given))


def test_every_parameter_is_either_the_engines_or_the_nodes() -> None:
    assert OTHER.keys() == {each.name for each in fields(SamplingParams)} - {"unset"}


@pytest.mark.parametrize("name", OTHER)
def test_a_parameter_that_is_not_at_its_default_is_used_unless_the_node_does_it(name: str) -> None:
    assert asked(**{name: OTHER[name]}).used == (() if name in NEVER_LACKING else (name,))


def test_what_a_request_uses_is_refused_by_the_name_of_its_field() -> None:
    request = asked(presence_penalty=1, min_p=0.1)
    assert request.lacking(dict.fromkeys(("constraint", "top_k", "seed"), "llama.cpp b7200")) is None
    error = request.lacking({"top_k": "vllm", "presence_penalty": "llama.cpp b7200"})
    assert error is not None
    assert (error.code, error.reason, error.violations[0].field) == (
        Code.FAILED_PRECONDITION,
        ENGINE_LACKS,
        "sampling.presence_penalty",
    )
    assert error.metadata == {"model": "demo", "field": "sampling.presence_penalty", "engine": "llama.cpp b7200"}
    assert str(error) == "sampling.presence_penalty: not supported by the engine of model 'demo' (llama.cpp b7200)"


def test_a_form_that_tools_demand_is_refused_as_tools() -> None:
    prompt = ChatPrompt((Message(Role.USER, "hello"),), tools=Tools((Tool("f"),), ToolMode.REQUIRED))
    error = GenerationRequest("demo", prompt, SamplingParams()).lacking({"constraint": ""})
    assert error is not None
    assert error.violations[0].field == "tools"
