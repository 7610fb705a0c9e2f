"""What a watch shows now: the view, its order and filter, and what was told last. It knows no terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.cli.watch.recall import Recall, age_of
from ryzanstein.cli.watch.rows import VIEWS, silent_sources, totals
from ryzanstein.cli.watch.table import Order, ShownTable, WatchRow, WatchTable, chart, filtered, fitted, sorted_rows
from ryzanstein.cli.watch.trends import CLUSTER, Trends
from ryzanstein.client.cleaning import clean
from ryzanstein.survey.problems import problems
from ryzanstein.survey.views import ClusterStatus

PROBLEM_LINES = 2
_LATE_S = 3.0
_NUMERIC_FIRST = (int, float)


@dataclass(slots=True)
class WatchBoard:
    """The state of a watch. `where` says who is asked, `read_only`: nothing can be changed from here."""

    where: str
    read_only: bool = False
    view_name: str = "nodes"
    filter: str = ""
    paused: bool = False
    status: ClusterStatus | None = None
    trends: Trends = field(default_factory=Trends)
    _taken_at: float = 0.0
    _tables: dict[str, WatchTable] = field(default_factory=dict)
    _recalls: dict[str, Recall] = field(default_factory=lambda: {name: Recall() for name in VIEWS})
    _orders: dict[str, Order] = field(default_factory=dict)
    _widths: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)

    def take(self, status: ClusterStatus, now: float) -> None:
        """Takes a sample."""
        self.status, self._taken_at = status, now
        self.trends.take(status, now)
        silent = silent_sources(status, self._nodes(now))
        for name, (_, made) in VIEWS.items():
            self._tables[name] = made(status, self.trends, now)
            self._recalls[name].take(self._tables[name], silent, now)

    def _nodes(self, now: float) -> set[str]:
        """Returns all nodes that are known, also those that nobody names now."""
        return {row.source for row in self._recalls["nodes"].table(WatchTable("nodes", ()), now).rows}

    def choose(self, text: str) -> bool:
        """Shows the view with a name that begins so, or with a key. Returns False if there is none."""
        wanted = text.strip().casefold()
        for name, (key, _) in VIEWS.items():
            if wanted and (name.startswith(wanted) or key == wanted):
                self.view_name, self.filter = name, ""
                return True
        if wanted and "links".startswith(wanted):
            return self.choose("routers")
        return False

    def sort(self, letter: str) -> bool:
        """Sorts by the column of a letter: numbers from the largest on, and the other way if it is done again."""
        if (table := self._tables.get(self.view_name)) is None:
            return False
        column = next((at for at, each in enumerate(table.columns) if each.letter == letter.upper()), None)
        if column is None:
            return False
        before = self.order
        falling = any(isinstance(row.cells[column].value, _NUMERIC_FIRST) for row in table.rows)
        if before.column == column:
            falling = not before.falling
        self._orders[self.view_name] = Order(column, falling)
        return True

    @property
    def order(self) -> Order:
        table = self._tables.get(self.view_name)
        default = Order() if table is None else Order(table.first, table.falling)
        return self._orders.get(self.view_name, default)

    def shown(self, width: int, now: float) -> ShownTable | None:
        """Returns what is seen of the view. None: nobody has answered yet."""
        if (made := self._tables.get(self.view_name)) is None:
            return None
        table = self._recalls[self.view_name].table(made, now)
        rows = sorted_rows(filtered(table.rows, self.filter), self.order)
        table = WatchTable(table.name, table.columns, tuple(rows), table.first, table.falling)
        place = (self.view_name, width)
        shown = fitted(table, width, self.order, self._widths.get(place))
        self._widths = {place: shown.widths}  # of this place alone: another width, or view, begins anew
        return shown

    def row(self, key: str, now: float) -> WatchRow | None:
        """Returns a row of the view by its key."""
        if (made := self._tables.get(self.view_name)) is None:
            return None
        return next((row for row in self._recalls[self.view_name].table(made, now).rows if row.key == key), None)

    def table(self) -> WatchTable | None:
        """Returns the table of the view as the last sample has it."""
        return self._tables.get(self.view_name)

    def top(self, width: int, now: float) -> str:
        """Returns the first line: what the cluster does, how this watch stands, and how loaded the cluster was."""
        if self.status is None:
            return f"nobody has answered yet: {clean(self.where)}"[:width]
        late = now - self._taken_at
        flags = [
            *(["PAUSED"] if self.paused else [f"{age_of(late)} old"] if late > _LATE_S else []),
            *(["read-only"] if self.read_only else []),
            *([f"filter: {clean(self.filter)}"] if self.filter else []),
        ]
        line = "   ".join([totals(self.status, self.trends, self._nodes(now)), *flags])
        room = width - len(line) - 2
        shares = self.trends.of(CLUSTER).shares
        return f"{line}  {chart(shares, min(room, len(shares)))}" if room > 0 else line[:width]

    def problem_lines(self, width: int) -> tuple[tuple[str, bool], ...]:
        """Returns the worst problems, in as many lines as there always are; with each whether it is one."""
        if self.status is None:
            return (("", False),) * PROBLEM_LINES
        found = [" ".join(clean(each).split()) for each in problems(self.status)]
        if not found:
            return ("no problems", False), ("", False)
        more = len(found) - PROBLEM_LINES
        lines = [_cut(each, width) for each in found[:PROBLEM_LINES]]
        if more > 0:
            tail = f"  (and {more} more: 0)"
            lines[-1] = _cut(found[PROBLEM_LINES - 1], width - len(tail)) + tail
        return tuple((line, True) for line in [*lines, ""][:PROBLEM_LINES])

    def empty(self) -> str:
        """Returns why no row is seen."""
        if self.filter:
            return f"no row has {clean(self.filter)!r}; esc shows all"
        if self.status is not None and {"orchestrator", "router"} <= self.status.errors.keys():
            return "nothing answers; `ryzanstein up` starts a cluster"
        return {"losses": "nothing was lost", "problems": "no problems"}.get(self.view_name, f"no {self.view_name}")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
