"""The id of a call is the client's where it is one, by the same rule on every face."""

from __future__ import annotations

import re

import pytest

from ryzanstein.request_id import request_id


@pytest.mark.parametrize("given", ["a", "0d7c-1", "~" * 128, "!x/y=z"])
def test_visible_ascii_stays(given: str) -> None:
    assert request_id(given) == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a\n", "\x00", "x" * 10**6])
def test_anything_else_is_replaced(given: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id(given))
