"""Remembers rows of services that are silent: they turn old and never vanish, until the service is back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ryzanstein.cli.watch.table import WatchRow, WatchTable
from ryzanstein.survey.problems import MISSED_S


class Recall:
    """The rows of one table as they were told last."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[WatchRow, float]] = {}
        self._silent: set[str] = set()

    def take(self, table: WatchTable, silent: Collection[str], now: float) -> None:
        """Takes the table of a sample. Rows that are not in it are kept while their source is one of `silent`."""
        told = {row.key: row for row in table.rows}
        for key, (row, seen) in list(self._known.items()):
            if key not in told and (row.source not in silent or now - seen > MISSED_S):
                del self._known[key]
        self._silent = set(self._known) - set(told)
        for key, row in told.items():
            if not row.silent:
                self._known[key] = (row, now)
            else:
                self._silent.add(key)
                self._known[key] = (row, self._known[key][1] if key in self._known else row.heard or now)

    def table(self, table: WatchTable, now: float) -> WatchTable:
        """Returns a table with all known rows in place of its own, the old ones with their age."""
        rows = [_old(row, now - seen) if key in self._silent else row for key, (row, seen) in self._known.items()]
        return replace(table, rows=tuple(rows))


def _old(row: WatchRow, seconds: float) -> WatchRow:
    cells = tuple(replace(each, text=each.stale) if each.stale else each for each in row.cells)
    return replace(row, cells=cells, age=age_of(seconds))


def age_of(seconds: float) -> str:
    """Returns an age in words that change seldom."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h"
