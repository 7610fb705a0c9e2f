"""Errors as people read them."""

from __future__ import annotations

import io

from rich.console import Console

from ryzanstein import errors
from ryzanstein.cli import display
from ryzanstein.errors import RyzansteinError


def visible(error: RyzansteinError) -> str:
    console = Console(file=io.StringIO(), width=200)
    display.show_error(console, error)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_wrong_field_is_named_with_its_bound() -> None:
    text = visible(errors.invalid("sampling.temperature", "must be in [0, 2]", 3))
    assert text == "error: sampling.temperature must be in [0, 2], got 3 (INVALID_ARGUMENT)\n"


def test_a_field_that_the_message_does_not_begin_with_is_named_below() -> None:
    lines = visible(errors.context_too_long(900, 200, 1000)).splitlines()
    assert lines[0].startswith("error: This model's maximum context length is 1000 tokens.")
    assert lines[0].endswith("(INVALID_ARGUMENT, CONTEXT_TOO_LONG)")
    assert lines[1:] == ["  field sampling.max_tokens: prompt and answer have at most 1000 tokens"]


def test_a_full_queue_says_when_to_come_back() -> None:
    assert "try again in 1.5 s" in visible(errors.queue_full(9, 8, retry_after_s=1.5))


def test_what_is_missing_is_named() -> None:
    assert visible(errors.not_found("model", "gone")) == "error: no such model: 'gone' (NOT_FOUND, MODEL_NOT_FOUND)\n"


def test_square_brackets_in_messages_are_not_markup() -> None:
    assert "[/bold]" in visible(errors.internal("[/bold]"))
