"""How an answer is shown: complete blocks once, nothing that a terminal obeys, the bytes as they are in a pipe."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ryzanstein.cli import display
from ryzanstein.cli.chat.blocks import MOST_OPEN, MarkdownBlocks
from ryzanstein.cli.chat.views import MarkdownView, PipeView, PlainView
from ryzanstein.client import Move, Moved, Reasoning, Text, ToolPiece
from ryzanstein.errors import Code, RyzansteinError

ATTACK = "\x1b[2J\x1b]52;c;aGVsbG8=\x07\x9b31m\u202eevil"


def text(piece: str) -> Text:
    return Text(0, "node-0", 0, piece, (1,))


def shown(view_class: Any, *events: Any, width: int = 80) -> str:
    out, people = io.StringIO(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    view = view_class(console, Console(file=people, width=width))
    for event in events:
        view.show(event)
    view.end()
    return out.getvalue() + people.getvalue()


@given(st.text(alphabet="ab `~\n#-", max_size=300), st.integers(1, 7))
def test_blocks_are_the_text_whatever_the_pieces(whole: str, size: int) -> None:
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    blocks = MarkdownBlocks()
    found = [block.text for piece in pieces for block in blocks.feed(piece)]
    found += [block.text for block in blocks.rest()]
    assert "".join(found) == whole
    whole_at_once = MarkdownBlocks()
    assert len(list(whole_at_once.feed(whole))) <= 1


def test_a_blank_line_inside_a_fence_ends_nothing() -> None:
    blocks = MarkdownBlocks()
    assert list(blocks.feed("```py\na = 1\n\nb = 2\n")) == []
    (block,) = blocks.feed("```\n\nafter")
    assert block.text == "```py\na = 1\n\nb = 2\n```\n\n"
    assert blocks.open == "after"


def test_a_block_that_never_ends_is_shown_as_it_is_written() -> None:
    blocks, found = MarkdownBlocks(), []
    for _ in range(200):
        found += blocks.feed("a line of some length that ends nothing\n")
        assert len(blocks.open) <= MOST_OPEN
    assert found
    assert not any(block.formatted for block in found)


@pytest.mark.parametrize("view_class", [PlainView, MarkdownView])
def test_no_sequence_of_a_model_reaches_the_terminal(view_class: Any) -> None:
    output = shown(
        view_class,
        text(ATTACK),
        text("\n\n```\n" + ATTACK + "\n```\n\n[a](javascript:x) " + ATTACK),
        Reasoning(0, ATTACK),
        ToolPiece(0, 0, "c", ATTACK, ATTACK),
        Moved(Move(0, "node-0", ATTACK, 3, 0.2)),
    )
    own = output.replace("\x1b[?25l", "").replace("\x1b[?25h", "").replace("\x1b[2K", "").replace("\x1b[1A", "")
    assert "\x1b" not in own
    assert "\x07" not in own
    assert "\x9b" not in own
    assert "\u202e" not in own
    assert "evil" in own


def test_a_move_is_one_line_and_reasoning_stands_apart() -> None:
    output = shown(
        MarkdownView, Reasoning(0, "I think.\nTwice."), text("**Yes**"), Moved(Move(0, "node-1", "node-2", 3, 0.212)), text(".")
    )
    assert "node-1 -> node-2 after 212 ms, nothing lost" in output
    assert output.index("reasoning") < output.index("Twice.") < output.index("Yes")


def test_a_pipe_gets_the_bytes(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    view = PipeView()
    view.show(text("a\x1b[2J"))
    view.show(Reasoning(0, "thinks"))
    view.show(ToolPiece(0, 0, "c", "f", "{}"))
    view.end()
    assert capfdbinary.readouterr().out == b"a\x1b[2J\nf {}\n"


def test_an_error_of_a_server_is_cleaned() -> None:
    out = io.StringIO()
    display.show_error(Console(file=out), RyzansteinError(ATTACK, Code.INTERNAL, "INTERNAL"))
    assert "\x1b" not in out.getvalue()
