"""Errors as people read them."""

from __future__ import annotations

import io

from rich.console import Console

from ryzanstein import errors
from ryzanstein.cli import display
from ryzanstein.errors import RyzansteinError


def shown(error: RyzansteinError) -> str:
    console = Console(file=io.StringIO(), width=200)
    display.show_error(console, error)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_wrong_field_is_named_with_its_bound() -> None:
    text = shown(errors.invalid("sampling.temperature", "must be in [0, 2]", 3))
    assert "INVALID_ARGUMENT" in text
    assert "field sampling.temperature: must be in [0, 2]" in text


def test_a_full_queue_says_when_to_come_back() -> None:
    assert "try again in 1.5 s" in shown(errors.queue_full(9, 8, retry_after_s=1.5))


def test_what_is_missing_is_named() -> None:
    assert "model: gone" in shown(errors.not_found("model", "gone"))


def test_square_brackets_in_messages_are_not_markup() -> None:
    assert "[/bold]" in shown(errors.internal("[/bold]"))
