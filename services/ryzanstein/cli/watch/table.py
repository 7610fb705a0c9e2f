"""A table that is watched: its values, their order, and what of them fits a width.

Frozen values and pure functions. All text that enters a table is cleaned here, once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.cells import cell_len, chop_cells, set_cell_size

from ryzanstein.cli.fitted_table import FOLDED, kept_columns
from ryzanstein.client.cleaning import clean

Tone = Literal["", "good", "warn", "bad", "silent", "title", "sorted"]
CHART = 60
"""How many values a chart shows at most."""
_LEAST_CHART = 8
_GAP = 2
_MOST_LINES = 4
_BARS = "▁▂▃▄▅▆▇█"
_NUMBERS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class WatchColumn:
    """A column. `leaves` and `folds` are those of a `FittedTable`; `chart`: it takes the room that others leave.

    `letter` sorts by it; empty: nothing does.
    """

    title: str
    leaves: int = 0
    folds: bool = False
    chart: bool = False
    letter: str = ""


@dataclass(frozen=True, slots=True)
class WatchCell:
    """A text and what it is sorted by: None is not known, and comes last. `series` are the values of a chart.

    `stale` stands in its place once the row is old; empty: it stays.
    """

    text: str
    value: float | str | None = None
    tone: Tone = ""
    series: tuple[float | None, ...] = ()
    stale: str = ""


@dataclass(frozen=True, slots=True)
class WatchRow:
    """A row. `source` is the service that reports it: the row is old while that does not answer. `silent`: others report that.

    `age` is shown where the row is old; empty: it is not. `node_id` and `model` are what actions are about.
    `heard` is when the source last reported, in Unix seconds; 0: not known.
    """

    key: str
    cells: tuple[WatchCell, ...]
    source: str = ""
    node_id: str = ""
    model: str = ""
    silent: bool = False
    heard: float = 0.0
    age: str = ""


@dataclass(frozen=True, slots=True)
class WatchTable:
    """`first` is the column by which it is sorted unless somebody chose another; `falling`: the largest first."""

    name: str
    columns: tuple[WatchColumn, ...]
    rows: tuple[WatchRow, ...] = ()
    first: int = 0
    falling: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """By which column rows are sorted, and whether the largest comes first."""

    column: int = 0
    falling: bool = False


@dataclass(frozen=True, slots=True)
class ShownLine:
    """A line of the screen: pieces of text of its width in all, each with its tone. A row may take several lines."""

    key: str
    pieces: tuple[tuple[str, Tone], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class ShownTable:
    """What is seen of a table. `left_out` are the titles of columns without room, `widths` what columns take."""

    head: ShownLine
    lines: tuple[ShownLine, ...]
    left_out: tuple[str, ...] = ()
    widths: dict[int, int] = field(default_factory=dict)
    num_rows: int = 0


def cell(text: object, value: float | str | None = None, tone: Tone = "", *, stale: str = "") -> WatchCell:
    """Returns a cell of text that another machine may have written. Without a value it is sorted by its text."""
    visible = " ".join(clean(str(text)).split())
    known = value if value is not None else None if visible in ("", "-") else visible
    return WatchCell(visible or "-", known, tone, stale=stale)


def number(value: float | None, text: str = "") -> WatchCell:
    """Returns a cell that is sorted by its number. None: it is not known."""
    return WatchCell("-") if value is None else WatchCell(text or f"{value:g}", value)


def lettered(*columns: WatchColumn) -> tuple[WatchColumn, ...]:
    """Returns the columns, each with the first letter of its title that no column before it has."""
    taken: set[str] = set()
    found = []
    for column in columns:
        letter = next((each for each in column.title.upper() if each.isascii() and each.isalpha() and each not in taken), "")
        taken.add(letter)
        found.append(replace(column, letter=letter))
    return tuple(found)


def sort_key(value: float | str | None) -> tuple[int, float, list[tuple[int, int, str]]]:
    """Returns what values are compared by: numbers before text, and node-10 after node-2."""
    if value is None:
        return 2, 0.0, []
    if isinstance(value, str):
        parts = _NUMBERS.split(value.casefold())
        return 1, 0.0, [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
    return 0, value, []


def sorted_rows(rows: Sequence[WatchRow], order: Order) -> list[WatchRow]:
    """Returns the rows in an order; what is not known comes last, and rows that are equal stand by their first cell."""
    by_name = sorted(rows, key=lambda row: (sort_key(row.cells[0].value), row.key))
    known = [row for row in by_name if row.cells[order.column].value is not None]
    unknown = [row for row in by_name if row.cells[order.column].value is None]
    return sorted(known, key=lambda row: sort_key(row.cells[order.column].value), reverse=order.falling) + unknown


def filtered(rows: Sequence[WatchRow], text: str) -> list[WatchRow]:
    """Returns the rows that have all words; a word after `!` is one that they do not have."""
    wanted = [word for word in text.casefold().split() if not word.startswith("!")]
    unwanted = [word[1:] for word in text.casefold().split() if word.startswith("!") and len(word) > 1]

    def has(row: WatchRow) -> bool:
        told = "\n".join(each.text for each in row.cells).casefold()
        return all(word in told for word in wanted) and not any(word in told for word in unwanted)

    return [row for row in rows if has(row)]


def chart(series: Sequence[float | None], width: int) -> str:
    """Returns the last values, each from 0 to 1, as a line of bars.

    Nothing is a blank, and so is what is not known: a row that rests does not change while its chart grows.
    """
    last = list(series)[-width:] if width > 0 else []
    return "".join(_BARS[min(len(_BARS) - 1, int(value * len(_BARS)))] if value else " " for value in last).rjust(width)


def fitted(table: WatchTable, width: int, order: Order, at_least: dict[int, int] | None = None) -> ShownTable:
    """Returns what of a table, whose rows are sorted already, is seen in a width.

    `at_least` are widths that columns had before: a column that never narrows moves no other row when a text becomes shorter.
    """
    columns = table.columns
    ages = max((cell_len(row.age) for row in table.rows), default=0)
    room = width - (ages + _GAP if ages else 0)
    natural = [max(_natural(table, number, order), (at_least or {}).get(number, 0)) for number in range(len(columns))]
    least = [_least(column, natural[number]) for number, column in enumerate(columns)]
    kept = kept_columns([column.leaves for column in columns], [each + _GAP for each in least], room + _GAP)
    widths = _widened(columns, kept, natural, least, room)
    head = [_title(columns[number], order, number, widths[number]) for number in kept]
    lines = [line for row in table.rows for line in _lines(row, kept, widths, ages)]
    left_out = tuple(column.title for number, column in enumerate(columns) if number not in kept)
    told = {number: natural[number] for number in range(len(columns)) if not columns[number].chart}
    return ShownTable(
        ShownLine("", _spaced(head, width)), tuple(_cut(line, width) for line in lines), left_out, told, len(table.rows)
    )


def _natural(table: WatchTable, number: int, order: Order) -> int:
    column = table.columns[number]
    if column.chart:
        return CHART
    return max(cell_len(column.title) + (number == order.column), *(cell_len(row.cells[number].text) for row in table.rows), 1)


def _least(column: WatchColumn, natural: int) -> int:
    if column.chart:
        return _LEAST_CHART
    return min(natural, FOLDED) if column.folds else natural


def _widened(
    columns: Sequence[WatchColumn], kept: Sequence[int], natural: Sequence[int], least: Sequence[int], room: int
) -> dict[int, int]:
    """Returns the widths of the columns that are kept: first names get the room that is left, then charts."""
    widths = {number: least[number] for number in kept}
    left = room - sum(widths.values()) - _GAP * (len(kept) - 1)
    for number in sorted(kept, key=lambda number: (columns[number].chart, columns[number].leaves, number)):
        more = max(0, min(left, natural[number] - widths[number]))
        widths[number] += more
        left -= more
    return widths


def _title(column: WatchColumn, order: Order, number: int, width: int) -> tuple[str, Tone]:
    """Returns a title with its letter in upper case, and an arrow if rows are sorted by it."""
    place = column.title.upper().find(column.letter) if column.letter else -1
    title = column.title if place < 0 else column.title[:place].lower() + column.letter + column.title[place + 1 :].lower()
    by_it = number == order.column
    return set_cell_size(title + (("▼" if order.falling else "▲") if by_it else ""), width), "sorted" if by_it else "title"


def _lines(row: WatchRow, kept: Sequence[int], widths: dict[int, int], ages: int) -> list[ShownLine]:
    columns: list[list[str]] = []
    for number in kept:
        told, width = row.cells[number], widths[number]
        folded = [chart(told.series, width)] if told.series else _folded(told.text, width, never_cut=number == 0)
        columns.append(folded)
    if ages:
        columns.append([row.age])
    tones: list[Tone] = ["silent" if row.age else row.cells[number].tone for number in kept] + (
        ["silent" if row.age else ""] if ages else []
    )
    sizes = [widths[number] for number in kept] + ([ages] if ages else [])
    found = []
    for at in range(max(map(len, columns))):
        texts = [
            set_cell_size(column[at] if at < len(column) else "", size) for column, size in zip(columns, sizes, strict=True)
        ]
        found.append(ShownLine(row.key, tuple(zip(texts, tones, strict=True))))
    return found


def _folded(text: str, width: int, *, never_cut: bool) -> list[str]:
    """Returns a text in lines of a width. A name is never cut, so that two that begin alike can be told apart."""
    lines = chop_cells(text, max(1, width)) if cell_len(text) > width else [text]
    if len(lines) > _MOST_LINES and not never_cut:
        lines = [*lines[: _MOST_LINES - 1], set_cell_size(lines[_MOST_LINES - 1], max(0, width - 1)) + "…"]
    return lines


def _cut(line: ShownLine, width: int) -> ShownLine:
    return ShownLine(line.key, _spaced(line.pieces, width))


def _spaced(pieces: Sequence[tuple[str, Tone]], width: int) -> tuple[tuple[str, Tone], ...]:
    """Returns the pieces with gaps between them, of a width in all, also where a column had no room."""
    found: list[tuple[str, Tone]] = []
    left = width
    for place, (text, tone) in enumerate(pieces):
        piece = set_cell_size((" " * _GAP if place else "") + text, min(left, cell_len(text) + (_GAP if place else 0)))
        found.append((piece, tone))
        left -= cell_len(piece)
    return (*found, (" " * left, "")) if left > 0 else tuple(found)
