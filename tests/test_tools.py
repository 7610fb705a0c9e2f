"""What a request may offer as functions, and which field an error names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.tools import MAX_DEPTH, MAX_TOOLS, MAX_TOOLS_CHARS, Tool, ToolMode, Tools


def refusal(tools: Tools) -> str:
    with pytest.raises(RyzansteinError) as refused:
        tools.validate()
    return refused.value.message


def offering(parameters: str) -> Tools:
    return Tools((Tool("f", "", parameters),))


def nested(levels: int, inner: str = "") -> str:
    """An object with lists in it, `levels` deep in all."""
    return '{"a": ' + "[" * (levels - 1) + inner + "]" * (levels - 1) + "}"


def depth_of(value: Any) -> int:
    """The definition, by recursion."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@pytest.mark.parametrize(
    "inner", ["", "1", '"[[[["', '{"b": "]\\"}"}'], ids=["empty", "a number", "brackets in a string", "object"]
)
def test_parameters_may_be_nested_so_deeply_and_no_deeper(inner: str) -> None:
    levels = MAX_DEPTH - depth_of(json.loads(inner or "0"))
    offering(nested(levels, inner)).validate()
    assert refusal(offering(nested(levels + 1, inner))) == "tools[0].function.parameters: must be nested at most 64 levels deep"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}"\\ a\u00e9', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{\\"', max_size=3), inner, max_size=3),
    max_leaves=30,
)


@given(json_values, st.integers(0, 8), st.booleans())
def test_the_depth_is_that_of_a_walk(value: Any, missing: int, ascii_only: bool) -> None:
    levels = max(1, MAX_DEPTH - depth_of(value) + 4 - missing)
    parameters = nested(levels, json.dumps(value, ensure_ascii=ascii_only))
    if depth_of(json.loads(parameters)) <= MAX_DEPTH:
        offering(parameters).validate()
    else:
        assert "levels deep" in refusal(offering(parameters))


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        (Tools((Tool("f"),) * (MAX_TOOLS + 1)), "tools: must have at most 128 tools"),
        (offering(" " * MAX_TOOLS_CHARS), "tools: must have at most 262144 characters in total"),
        (Tools((Tool("f"), Tool("f"))), "tools[1].function.name: must differ"),
        (Tools((Tool("f g"),)), "tools[0].function.name: must have 1 to 64 letters"),
        (offering("["), "tools[0].function.parameters: must be JSON"),
        (offering("[" * 200_000), "tools[0].function.parameters: must be JSON"),
        (offering('{"a": ' + "9" * 10_000 + "}"), "tools[0].function.parameters: must be JSON"),
        (offering("[]"), "tools[0].function.parameters: must be an object"),
        (Tools(mode=ToolMode.REQUIRED), "tool_choice: requires tools"),
        (Tools((Tool("f"),), ToolMode.NAMED, "g"), "tool_choice.function.name: must be one of the tools"),
    ],
)
def test_what_is_wrong_is_named(tools: Tools, says: str) -> None:
    assert says in refusal(tools)
