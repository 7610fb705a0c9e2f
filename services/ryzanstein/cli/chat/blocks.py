"""Divides Markdown that still grows into blocks that are complete and the one that is not.

A complete block never changes again, so it is laid out once, however long the answer becomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MOST_OPEN = 4096
"""Characters of an open block that is laid out again and again. What is longer is shown as it is written."""
_FENCES = "```", "~~~"


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of an answer. `formatted`: they are Markdown; otherwise they are shown as they are."""

    text: str
    formatted: bool = True


class MarkdownBlocks:
    """A text as it arrives. MarkdownBlocks end at blank lines outside of fences."""

    def __init__(self) -> None:
        self.open = ""
        """The block that is not complete yet."""
        self._is_long = False

    def feed(self, piece: str) -> Iterator[Block]:
        """Yields the blocks that are complete with this piece."""
        self.open += piece
        if "\n" in piece and (end := self._complete()):
            closed, self.open = self.open[:end], self.open[end:]
            yield Block(closed, not self._is_long)
            self._is_long = False
        if len(self.open) > MOST_OPEN:
            self._is_long = True
            end = self.open.rfind("\n") + 1 or len(self.open)
            long, self.open = self.open[:end], self.open[end:]
            yield Block(long, formatted=False)

    def rest(self) -> Iterator[Block]:
        """Yields what is left at the end."""
        if self.open:
            yield Block(self.open, not self._is_long)
        self.open, self._is_long = "", False

    def _complete(self) -> int:
        """Returns the end of the last complete block; 0: there is none."""
        fence, at, end = "", 0, 0
        for line in self.open.splitlines(keepends=True):
            at += len(line)
            mark = line.lstrip()[:3]
            if mark in _FENCES and fence in ("", mark):
                fence = "" if fence else mark
            elif not fence and not line.strip() and line.endswith("\n"):
                end = at
        return end
