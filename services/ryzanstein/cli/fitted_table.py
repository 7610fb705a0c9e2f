"""A table that fits its width.

If there is little room, it drops the least important columns and folds names instead of cutting
them.

The dropped columns are listed below the table. A name is always shown in full, so that two nodes
whose names begin alike can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table

FOLDED = 20  # width that is enough for a column that folds
_FRAME, _PADDING = 1, 3  # width of a table's frame, and padding of each column


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a `FittedTable`.

    `leaves`: the column with the highest number is dropped first, one with 0 never. `folds`: its
    text may take several lines.

    A column that neither folds nor leaves shows where each row begins.
    """

    title: str
    leaves: int = 0
    folds: bool = False


class FittedTable:
    """A table of text. It is a renderable of rich."""

    def __init__(self, title: str, *columns: Column) -> None:
        self._title = title
        self.columns = columns
        self._rows: list[Sequence[str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *cells: str) -> None:
        """Adds a row, one text for each column."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        kept = self._kept(options.max_width)
        left_out = [column.title for number, column in enumerate(self.columns) if number not in kept]
        table = Table(title=self._title, caption=f"not shown here: {', '.join(left_out)}" if left_out else None)
        for column in map(self.columns.__getitem__, kept):
            table.add_column(column.title, no_wrap=not column.folds, overflow="fold" if column.folds else "ellipsis")
        for row in self._rows:
            table.add_row(*map(row.__getitem__, kept))
        yield table

    def _kept(self, width: int) -> list[int]:
        """Returns the columns that fit."""
        widths = [_PADDING + self._width(number) for number in range(len(self.columns))]
        return kept_columns([column.leaves for column in self.columns], widths, width - _FRAME)

    def _width(self, number: int) -> int:
        column = self.columns[number]
        natural = max(cell_len(text) for text in (column.title, *(row[number] for row in self._rows)))
        return min(natural, FOLDED) if column.folds else natural


def kept_columns(leaves: Sequence[int], widths: Sequence[int], room: int) -> list[int]:
    """Returns the columns that fit: those that leave first, see `Column`, leave until the others have room."""
    kept = list(range(len(widths)))
    while sum(widths[number] for number in kept) > room:
        last = max(kept, key=lambda number: leaves[number])
        if not leaves[last]:
            break
        kept.remove(last)
    return kept
