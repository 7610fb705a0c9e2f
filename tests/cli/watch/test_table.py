"""Tables that are watched: their order, filters, and what of them fits a width."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from ryzanstein.cli.watch.table import (
    CHART,
    Order,
    ShownTable,
    WatchCell,
    WatchColumn,
    WatchRow,
    WatchTable,
    cell,
    chart,
    filtered,
    fitted,
    lettered,
    number,
    sorted_rows,
)

COLUMNS = lettered(
    WatchColumn("node", folds=True),
    WatchColumn("state"),
    WatchColumn("notes", 2, folds=True),
    WatchColumn("running", 1),
    WatchColumn("load", 3, chart=True),
)


def row(name: str, running: float | None = 0, notes: str = "", *, state: str = "READY", age: str = "") -> WatchRow:
    series = WatchCell("", running, series=(0.0, 0.5, 1.0))
    return WatchRow(name, (cell(name), cell(state), cell(notes), number(running), series), age=age)


def table(*rows: WatchRow) -> WatchTable:
    return WatchTable("nodes", COLUMNS, rows)


def names(rows: list[WatchRow]) -> list[str]:
    return [each.key for each in rows]


def texts(shown: ShownTable) -> list[str]:
    return [line.text.rstrip() for line in shown.lines]


def test_every_column_has_a_letter_of_its_own() -> None:
    assert [column.letter for column in COLUMNS] == ["N", "S", "O", "R", "L"]
    assert [column.letter for column in lettered(WatchColumn("a"), WatchColumn("aa"))] == ["A", ""]


def test_rows_are_sorted_by_number_and_names_by_the_numbers_in_them() -> None:
    rows = [row("node-10", 3), row("node-2", 20), row("node-1", None)]
    assert names(sorted_rows(rows, Order(0))) == ["node-1", "node-2", "node-10"]
    assert names(sorted_rows(rows, Order(0, falling=True))) == ["node-10", "node-2", "node-1"]
    assert names(sorted_rows(rows, Order(3))) == ["node-10", "node-2", "node-1"]


def test_what_is_not_known_comes_last_in_both_directions() -> None:
    rows = [row("a", None), row("b", 1), row("c", 2)]
    assert names(sorted_rows(rows, Order(3, falling=True))) == ["c", "b", "a"]
    assert names(sorted_rows(rows, Order(3))) == ["b", "c", "a"]


def test_equal_rows_stand_by_name_in_both_directions() -> None:
    rows = [row("node-3"), row("node-1"), row("node-2")]
    for falling in (False, True):
        assert names(sorted_rows(rows, Order(3, falling=falling))) == ["node-1", "node-2", "node-3"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ["node-1", "node-2"]),
        ("NODE-1", ["node-1"]),
        ("node slow", ["node-2"]),
        ("!slow", ["node-1"]),
        ("!", ["node-1", "node-2"]),
        ("nothing", []),
    ],
)
def test_a_filter_takes_rows_that_have_all_its_words(text: str, left: list[str]) -> None:
    assert names(filtered([row("node-1"), row("node-2", notes="slow")], text)) == left


def test_columns_leave_by_their_ranks_and_are_named() -> None:
    rows = table(row("node-1", notes="some words"))
    assert fitted(rows, 120, Order()).left_out == ()
    assert fitted(rows, 40, Order()).left_out == ("load",)
    assert fitted(rows, 30, Order()).left_out == ("notes", "load")
    assert fitted(rows, 12, Order()).left_out == ("notes", "running", "load")


@pytest.mark.parametrize("width", [0, 1, 5, 20, 60, 120, 300])
def test_every_line_is_as_wide_as_its_place(width: int) -> None:
    long = "a-node-with-a-name-of-中文字符-that-is-much-longer-than-its-place-allows"
    shown = fitted(table(row("node-1"), row(long, notes="x " * 400, age="12 s")), width, Order())
    assert {cell_len(line.text) for line in (shown.head, *shown.lines)} == {width}


def test_a_name_is_never_cut_and_a_note_is() -> None:
    long = "".join(f"part{at}-" for at in range(30))
    shown = fitted(table(row(long, notes="y" * 2000)), 80, Order())
    assert "".join(line.pieces[0][0].strip() for line in shown.lines) == long
    notes = "".join(line.pieces[2][0].strip() for line in shown.lines)
    assert notes.endswith("…")
    assert {line.key for line in shown.lines} == {long}


def test_a_row_that_is_old_is_grey_and_has_its_age() -> None:
    shown = fitted(table(row("node-1"), row("node-2", age="12 s")), 80, Order())
    young, old = shown.lines
    assert old.text.endswith("12 s")
    assert {tone for _, tone in old.pieces} == {"silent"}
    assert "silent" not in {tone for _, tone in young.pieces}


def test_a_column_never_narrows_so_that_no_other_row_moves() -> None:
    before = fitted(table(row("node-1", notes="long notes"), row("node-2")), 80, Order())
    after = fitted(table(row("node-1", notes="-"), row("node-2")), 80, Order(), before.widths)
    assert before.lines[1] == after.lines[1]
    assert before.lines[1] != fitted(table(row("node-1", notes="-"), row("node-2")), 80, Order()).lines[1]


def test_the_title_says_the_letter_and_the_order() -> None:
    head = fitted(table(row("node-1")), 120, Order(3, falling=True)).head
    assert [text.split()[0] for text, _ in head.pieces if text.strip()] == ["Node", "State", "nOtes", "Running▼", "Load"]
    assert [tone for text, tone in head.pieces if "▼" in text] == ["sorted"]


def test_a_chart_shows_the_last_values_from_nothing_to_full() -> None:
    assert chart([0.0, 0.01, 0.5, 1.0, None], 5) == " ▁▅█ "
    assert chart([0.0] * 50 + [1.0], 3) == "  █"
    assert chart([1.0], 4) == "   █"
    assert chart([1.0], 0) == ""
    assert len(chart([0.5] * 100, CHART)) == CHART


@pytest.mark.parametrize("hostile", ["\x1b[2J\x1b]52;c;aGk=\x07", "a\nb\rc\td", "\u202eabc", "\x9b31m", "a\x00b"])
def test_no_text_steers_the_terminal_or_takes_another_line(hostile: str) -> None:
    told = cell(hostile).text
    assert not set(told) & set("\x1b\x07\n\r\t\u202e\x9b\x00")


def test_markup_is_text() -> None:
    assert cell("[red]x[/]").text == "[red]x[/]"
    assert "[red]x[/]" in texts(fitted(table(row("[red]x[/]")), 80, Order()))[0]
