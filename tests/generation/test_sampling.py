"""Bounds of sampling parameters: each violation is refused by name."""

from __future__ import annotations

import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import SamplingParams


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": 2.01}, "sampling.temperature"),
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.1}, "sampling.top_p"),
        ({"min_p": 1.5}, "sampling.min_p"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "sampling.repetition_penalty"),
        ({"presence_penalty": 3.0}, "sampling.presence_penalty"),
        ({"frequency_penalty": -3.0}, "sampling.frequency_penalty"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"n": 0}, "sampling.n"),
        ({"n": 17}, "sampling.n"),
        ({"stop": ("",)}, "sampling.stop"),
        ({"stop": ("x" * 257,)}, "sampling.stop"),
        ({"stop": tuple("abcdefghijklmnopq")}, "sampling.stop"),
        ({"stop_token_ids": tuple(range(65))}, "sampling.stop_token_ids"),
        ({"logit_bias": ((1, 101.0),)}, "sampling.logit_bias"),
    ],
)
def test_a_parameter_out_of_its_bound_is_refused_by_name(params: dict[str, object], field: str) -> None:
    with pytest.raises(RyzansteinError) as caught:
        SamplingParams(**params).validate()  # type: ignore[arg-type]
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert [violation.field for violation in caught.value.violations] == [field]
    assert field in caught.value.message


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"temperature": 2.0}, {"seed": 2**64 - 1}, {"logprobs": 0}, {"n": 16}]
)
def test_the_bounds_themselves_are_allowed(params: dict[str, object]) -> None:
    SamplingParams(**params).validate()  # type: ignore[arg-type]
    assert SamplingParams(**params) == SamplingParams(**params)  # type: ignore[arg-type]
