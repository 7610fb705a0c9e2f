"""Patterns that people write are used; those that take exponential time are not."""

import time

import pytest

from ryzanstein.worker.adapters.patterns import fault_of

NAME = "model.language_model.layers.11.self_attn.query_key_value_and_more_projections"
USED = (
    r".*\.layers\.\d+\.(self_attn|mlp)\.(q_proj|k_proj)$",
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp).*?(?:q_proj|[()*+|]).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn)\.q_proj)",
    r"^model.decoder.layers.0.encoder_attn.k_proj",
    r"(model\.)?layers\.[^]+*]\.\(x\+\)\+",
    "",
)
REFUSED = ("(a+)+$", "(a|a)*b", r"((\.|[a-z])+_?)*x", "(?:(?:x{1,9})y?)+", "(.*a){12}", ".*" * 6, "[", "(", "a" * 10_001, "*")


@pytest.mark.parametrize("pattern", USED)
def test_patterns_that_are_used(pattern: str) -> None:
    assert fault_of(pattern) == ""


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_patterns_that_are_not_used(pattern: str) -> None:
    assert fault_of(pattern)


def test_the_worst_pattern_that_is_used_ends() -> None:
    import re

    worst = "[a-z._0-9]*" * 3 + "X"
    assert not fault_of(worst)
    began = time.process_time()
    assert re.fullmatch(worst, NAME) is None
    assert time.process_time() - began < 1
