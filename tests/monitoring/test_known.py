"""The tests of rules and dashboards see what is wrong with an expression."""

from __future__ import annotations

from typing import Any

import pytest

_BUCKET = "ryzanstein_router_time_to_first_token_seconds_bucket"


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum by (model) (rate(ryzanstein_router_toks_total[5m])) > 0", "no metric ryzanstein_router_toks_total"),
        ('up == 1 unless (up{pod="a"} offset 5m)', "up has no label pod"),
        (f'-increase({_BUCKET}{{le="3.0"}}[5m])', f"{_BUCKET} has no bucket up to 3.0"),
        ("max_over_time(sum(absent_metric)[5m:1m])", "no metric absent_metric"),
        ("topk(5, sum by (colour) (up))", "no label colour"),
    ],
)
def test_what_does_not_exist_is_found(expression: str, problem: str, unknown: Any) -> None:
    assert unknown(expression) == [problem]
