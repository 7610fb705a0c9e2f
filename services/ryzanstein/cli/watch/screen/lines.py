"""Lines on a screen, of which only those that changed are painted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ryzanstein.cli.watch.table import ShownLine, Tone

_STYLES: dict[Tone, Style] = {
    "": Style(),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red"),
    "silent": Style(color="bright_black"),
    "title": Style(bold=True),
    "sorted": Style(bold=True, underline=True),
}
_CURSOR = Style(reverse=True)


class LineView(ScrollView, can_focus=False):
    """Shows lines. `painted` counts the lines that were painted."""

    DEFAULT_CSS = """
    LineView { scrollbar-size: 0 0; background: transparent; }
    """

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.painted = 0
        self._lines: Sequence[ShownLine] = ()

    @property
    def lines(self) -> Sequence[ShownLine]:
        return self._lines

    def show(self, lines: Sequence[ShownLine]) -> None:
        """Shows other lines in place of those that are shown; paints only where they differ."""
        before, self._lines = self._lines, lines
        height = max(1, len(lines))
        if self.virtual_size.height != height or self.virtual_size.width != self.size.width:
            self.virtual_size = Size(self.size.width, height)
        for y in range(max(len(before), len(lines))):
            if y >= len(before) or y >= len(lines) or before[y] != lines[y]:
                self.refresh_line(y)

    def render_line(self, y: int) -> Strip:
        """Paints one line of the window."""
        self.painted += 1
        at, width = y + self.scroll_offset.y, self.size.width
        if at >= len(self._lines):
            return Strip.blank(width)
        return Strip(self._segments(self._lines[at])).adjust_cell_length(width)

    def _segments(self, line: ShownLine) -> list[Segment]:
        return [Segment(text, _STYLES[tone]) for text, tone in line.pieces]


class RowGrid(LineView, can_focus=True):
    """Shows rows, one of which is chosen: it stays chosen wherever it moves to."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Opened(Message):
        """Somebody wants to see all of the chosen row."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._chosen = ""
        self._keys: list[str] = []

    @property
    def chosen(self) -> str:
        """The key of the chosen row; empty: there is none."""
        return self._chosen

    @property
    def place(self) -> int:
        """Which row is chosen, from 1; 0: none."""
        return self._keys.index(self._chosen) + 1 if self._chosen in self._keys else 0

    def show(self, lines: Sequence[ShownLine]) -> None:
        """Shows other rows. If the chosen one is gone, the row in its place is chosen."""
        at = max(0, self.place - 1)
        self._keys = list(dict.fromkeys(line.key for line in lines if line.key))
        super().show(lines)
        if self._chosen not in self._keys:
            self._choose(self._keys[min(at, len(self._keys) - 1)] if self._keys else "")

    def action_move(self, rows: int) -> None:
        if self._keys:
            self._choose(self._keys[min(max(0, self.place - 1 + rows), len(self._keys) - 1)])

    def action_page(self, way: int) -> None:
        self.action_move(way * max(1, self.size.height - 1))

    def action_open(self) -> None:
        if self._chosen:
            self.post_message(self.Opened())

    def reveal(self) -> None:
        """Scrolls to the chosen row."""
        places = [at for at, line in enumerate(self._lines) if line.key == self._chosen]
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if places and places[0] < top:
            self.scroll_to(y=places[0], animate=False, immediate=True)
        elif places and places[-1] >= top + height:
            self.scroll_to(y=places[-1] - height + 1, animate=False, immediate=True)

    def _choose(self, key: str) -> None:
        before, self._chosen = self._chosen, key
        for at, line in enumerate(self._lines):
            if line.key in (before, key):
                self.refresh_line(at)
        self.reveal()

    def _segments(self, line: ShownLine) -> list[Segment]:
        segments = super()._segments(line)
        if line.key != self._chosen or not self._chosen:
            return segments
        return [Segment(each.text, (each.style or Style()) + _CURSOR) for each in segments]
