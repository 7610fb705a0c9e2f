"""Shows an answer as it arrives: formatted at a terminal, cleaned at a plain one, and as it is in a pipe."""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.rule import Rule
from rich.text import Text as Styled

from ryzanstein.cli.chat.blocks import Block, MarkdownBlocks
from ryzanstein.client import Event, Moved, Reasoning, Reattached, Text, ToolPiece, clean

_FRAME_S = 0.1


class AnswerView(Protocol):
    """Shows one answer after another."""

    def show(self, event: Event) -> None: ...

    def end(self) -> None:
        """The answer has ended, or failed."""
        ...


def view_of(out: Console, people: Console, *, plain: bool) -> AnswerView:
    """Returns the view for where the output goes."""
    if not out.is_terminal:
        return PipeView()
    return PlainView(out, people) if plain or os.environ.get("TERM") == "dumb" else MarkdownView(out, people)


def moved_line(event: Event) -> str:
    """Returns what is said when an answer goes on elsewhere; empty: it does not."""
    match event:
        case Moved(move):
            return f"{move.from_node} -> {move.to_node} after {move.silence_s * 1e3:.0f} ms, nothing lost"
        case Reattached(router):
            return f"connection lost; the answer goes on at {router}"
    return ""


def call_text(piece: ToolPiece) -> str:
    """Returns a piece of a call; the first piece begins a line."""
    return f"\n{piece.name} {piece.arguments}" if piece.id else piece.arguments


class PipeView:
    """Writes the bytes of the answer, and calls; everything else is for people."""

    def show(self, event: Event) -> None:
        match event:
            case Text():
                self._write(event.text)
            case ToolPiece():
                self._write(call_text(event))

    def end(self) -> None:
        self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.buffer.write(text.encode(errors="replace"))
        sys.stdout.buffer.flush()


class PlainView:
    """Prints pieces one after another, without what a terminal would obey."""

    def __init__(self, out: Console, people: Console) -> None:
        self._out, self._people = out, people

    def show(self, event: Event) -> None:
        match event:
            case Text():
                self._print(event.text)
            case Reasoning():
                self._print(event.text, "dim")
            case ToolPiece():
                self._print(call_text(event))
            case _:
                if line := moved_line(event):
                    self._people.print(Styled(f"\n{clean(line)}", style="dim"))

    def end(self) -> None:
        self._out.print()

    def _print(self, text: str, style: str = "") -> None:
        self._out.print(Styled(clean(text), style=style), end="", soft_wrap=True)


class MarkdownView:
    """Prints complete blocks once, and lays out only the open one again, ten times a second at most."""

    def __init__(self, out: Console, people: Console) -> None:
        self._out, self._people = out, people
        self._blocks = MarkdownBlocks()
        self._live: Live | None = None
        self._frame_at = 0.0
        self._reasons = self._calls = False
        self._line = ""

    def show(self, event: Event) -> None:
        match event:
            case Text():
                self._end_asides()
                self._feed(event.text)
            case Reasoning():
                if not self._reasons:
                    self._flush()
                    self._say(Rule("reasoning", style="dim"))
                self._reasons = True
                self._aside(event.text, "dim")
            case ToolPiece():
                self._flush()
                self._calls = True
                self._aside(call_text(event), "cyan")
            case _:
                if line := moved_line(event):
                    self._say(Styled(clean(line), style="dim"))

    def end(self) -> None:
        self._end_asides()
        self._flush()

    def _feed(self, text: str) -> None:
        if not text:
            return
        for block in self._blocks.feed(clean(text)):
            self._say(_rendered(block))
        self._frame()

    def _frame(self) -> None:
        """Lays the open block out, unless it was a moment ago."""
        now = time.monotonic()
        if now - self._frame_at < _FRAME_S:
            return
        self._frame_at = now
        if self._live is None:
            self._live = Live(console=self._out, auto_refresh=False, transient=True, vertical_overflow="crop")
            self._live.start()
        self._live.update(_rendered(Block(self._blocks.open)), refresh=True)

    def _say(self, content: RenderableType) -> None:
        """Prints above the open block, where it stays."""
        if self._live is not None:
            self._live.update(Group(), refresh=True)
        self._out.print(content)
        self._frame_at = 0.0

    def _flush(self) -> None:
        """Ends the open block."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        for block in self._blocks.rest():
            self._out.print(_rendered(block))

    def _aside(self, text: str, style: str) -> None:
        """Prints whole lines of what is not the answer."""
        *lines, self._line = (self._line + clean(text)).split("\n")
        for line in lines:
            if line:
                self._say(Styled(line, style=style))

    def _end_asides(self) -> None:
        if not (self._reasons or self._calls):
            return
        if self._line:
            self._say(Styled(self._line, style="dim" if self._reasons else "cyan"))
        if self._reasons:
            self._say(Rule(style="dim"))
        self._reasons, self._calls, self._line = False, False, ""


def _rendered(block: Block) -> RenderableType:
    return Markdown(block.text, hyperlinks=False) if block.formatted else Styled(block.text.rstrip("\n"))
