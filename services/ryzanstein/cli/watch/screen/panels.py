"""What lies over the table: pages of text, and questions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from textwrap import wrap
from typing import ClassVar

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static
from textual.worker import Worker

from ryzanstein.cli.watch.actions import Proposal
from ryzanstein.cli.watch.screen.lines import LineView
from ryzanstein.cli.watch.table import ShownLine

_AGAIN_S = 1.0
Source = Callable[[int], Awaitable[list[str]]]
"""Makes the lines of a page of a width."""


class PageScreen(Screen[None]):
    """A page of text; esc goes back. With `live` its text is made again each second."""

    CSS = """
    PageScreen { background: transparent; }
    PageScreen #page-title { height: 1; }
    PageScreen #page { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
    ]

    def __init__(self, title: str, source: Source, *, live: bool = False, from_end: bool = False) -> None:
        super().__init__()
        self._title, self._source, self._live, self._at_end = title, source, live, from_end
        self._making: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        yield LineView("page-title")
        yield LineView("page")

    def on_mount(self) -> None:
        self._make()
        if self._live:
            self.set_interval(_AGAIN_S, self._make)

    def on_resize(self) -> None:
        self.call_after_refresh(self._make)

    def action_back(self) -> None:
        self.dismiss()

    def action_move(self, lines: int) -> None:
        view = self.query_one("#page", LineView)
        view.scroll_to(y=max(0, view.scroll_offset.y + lines), animate=False, immediate=True)
        self._at_end = view.scroll_offset.y >= view.max_scroll_y and lines > 0

    def action_page(self, way: int) -> None:
        self.action_move(way * max(1, self.query_one("#page", LineView).size.height - 1))

    def _make(self) -> None:
        """Makes the text again, unless it is still being made."""
        if self._making is None or self._making.is_finished:
            self._making = self.run_worker(self._made())

    async def _made(self) -> None:
        width = max(1, self.size.width)
        lines = await self._source(width)
        hint = "   (esc: back)"
        title = (
            self._title if cell_len(self._title + hint) <= width else set_cell_size(self._title, width - len(hint) - 1) + "…"
        )
        self.query_one("#page-title", LineView).show([ShownLine("", ((title + hint, "title"),))])
        parts = [part for line in lines for part in _folded(line, width)]
        view = self.query_one("#page", LineView)
        view.show([ShownLine("", ((part, ""),)) for part in parts])
        if self._at_end:
            view.scroll_to(y=view.max_scroll_y, animate=False, immediate=True)


def _folded(line: str, width: int) -> list[str]:
    """Returns a line in parts that fit, divided between words where that is known to fit."""
    line = line.expandtabs(8)
    if cell_len(line) <= width:
        return [line]
    if not line.isascii():
        return chop_cells(line, width)
    indent = line[: len(line) - len(line.lstrip())][: width // 2]
    return wrap(line.strip(), width, initial_indent=indent, subsequent_indent=indent) or [""]


class AskScreen(ModalScreen[str]):
    """Asks whether an act shall be done; ends with what was answered, empty for no."""

    CSS = """
    AskScreen { align: center middle; background: transparent; overflow: hidden; }
    AskScreen Vertical { width: 96%; max-height: 100%; max-width: 76; height: auto; border: solid ansi_yellow; padding: 0 1; }
    AskScreen Vertical { background: ansi_default; }
    AskScreen Static { height: auto; background: ansi_default; }
    AskScreen Input { background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "no", show=False)]

    def __init__(self, proposal: Proposal) -> None:
        super().__init__()
        self._proposal = proposal

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._proposal.question), markup=False)
            if self._proposal.typed:
                yield Input(compact=True)

    def on_key(self, event: Key) -> None:
        """A key answers, unless the id has to be typed."""
        key = event.character
        if not self._proposal.typed and key is not None and key.isprintable():
            self.dismiss(key if key in "yY" else "")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

    def action_no(self) -> None:
        self.dismiss("")
