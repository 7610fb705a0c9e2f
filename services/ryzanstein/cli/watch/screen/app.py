"""The screen of `ryzanstein status --watch`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.screen import Screen
from textual.widgets import Input

from ryzanstein.cli.watch.actions import NodeAct, Operator, Proposal, Refusal, propose
from ryzanstein.cli.watch.board import PROBLEM_LINES, WatchBoard
from ryzanstein.cli.watch.opened.details import details
from ryzanstein.cli.watch.opened.local_log import log_lines
from ryzanstein.cli.watch.opened.stacks import stack_lines
from ryzanstein.cli.watch.rows import VIEWS
from ryzanstein.cli.watch.screen.lines import LineView, RowGrid
from ryzanstein.cli.watch.screen.panels import AskScreen, PageScreen
from ryzanstein.cli.watch.table import ShownLine, Tone
from ryzanstein.client.cleaning import clean
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.views import ClusterStatus

_FRAME_S = 0.25
_AGES_S = 1.0
_NOTE_S = 8.0
_LOW = 12
"""A screen with fewer lines has one line of problems, and no names of views."""
_HELP = (
    ("1 to 6, 0", "nodes, ranks, models, routers and links, generations, losses; all problems"),
    (":", "a view by its name"),
    ("shift+letter", "sort by the column that has the letter in upper case; again: the other way"),
    ("/", "show only rows that have all these words; !word: that do not have it"),
    ("up, down, page up, page down, home, end", "choose a row"),
    ("enter", "all of a row"),
    ("esc", "back; without a page above the table: all rows"),
    ("l", "the log of the row's node"),
    ("b", "what the row's node does now: the stacks of `ryzanstein debug`"),
    ("p", "pause, and go on"),
    ("q, ctrl+c", "quit"),
)
_HELP_OF_ACTS = (("d", "drain the row's node, after a question"), ("u", "let it take work again"))


@dataclass(frozen=True, slots=True)
class WatchSource:
    """Where samples come from, and what stops and starts them. `pause(True)` stops."""

    samples: Callable[[], AsyncIterator[ClusterStatus]]
    pause: Callable[[bool], None]


class MainScreen(Screen[None]):
    """The table of a view, below what stands out in the cluster."""

    CSS = """
    MainScreen { background: transparent; }
    MainScreen LineView { height: 1; }
    MainScreen #problems { height: 2; }
    MainScreen #rows { height: 1fr; }
    MainScreen Input { height: 1; display: none; background: transparent; }
    MainScreen.asks Input { display: block; }
    MainScreen.asks #foot { display: none; }
    MainScreen.low #views { display: none; }
    MainScreen.low #problems { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"view('{key}')", show=False) for key, _ in VIEWS.values()),
        Binding("slash", "ask('/')", show=False),
        Binding("colon", "ask(':')", show=False),
        Binding("question_mark", "help", show=False),
        Binding("escape", "all", show=False),
        Binding("d", "act('drain')", show=False),
        Binding("u", "act('undrain')", show=False),
        Binding("l", "log", show=False),
        Binding("b", "stacks", show=False),
        Binding("p", "pause", show=False),
        Binding("q", "quit", show=False),
    ]

    def __init__(self, board: WatchBoard, source: WatchSource, operator: Operator, dialer: Dialer, logs: Path | None) -> None:
        super().__init__()
        self._board, self._source, self._operator, self._dialer, self._logs = board, source, operator, dialer, logs
        self._asked = ""
        self._note, self._note_ends = "", 0.0
        self._changed, self._painted_at = True, 0.0
        self._stopped_at: float | None = None

    def compose(self) -> ComposeResult:
        yield LineView("top")
        yield LineView("problems")
        yield LineView("views")
        yield LineView("head")
        yield RowGrid("rows")
        yield LineView("foot")
        yield Input(compact=True)

    def on_mount(self) -> None:
        self.query_one(RowGrid).focus()
        self.run_worker(self._take(), name="samples")
        self.set_interval(_FRAME_S, self._frame)

    async def _take(self) -> None:
        async for status in self._source.samples():
            if not self._board.paused:
                self._board.take(status, time.time())
                self._changed = True

    def on_resize(self) -> None:
        self.set_class(self.size.height < _LOW, "low")
        self.call_after_refresh(self._paint)

    def _frame(self) -> None:
        """Paints what has changed, or is a second older."""
        if self._changed or time.monotonic() - self._painted_at >= _AGES_S:
            self._paint()

    def _paint(self) -> None:
        self._changed, self._painted_at = False, time.monotonic()
        now, width, board = self._stopped_at or time.time(), self.size.width, self._board
        self._show("top", (board.top(width, now), "title"))
        problems = board.problem_lines(width)[: 1 if self.has_class("low") else PROBLEM_LINES]
        tones: tuple[Tone, Tone] = ("good", "bad")
        self._show("problems", *((text, tones[is_problem]) for text, is_problem in problems))
        shown, rows = board.shown(width, now), self.query_one(RowGrid)
        self.query_one("#head", LineView).show([] if shown is None else [shown.head])
        empty = [] if shown is None else [ShownLine("", ((board.empty(), "silent"),))]
        rows.show(empty if shown is None or not shown.lines else shown.lines)
        self.query_one("#views", LineView).show([self._views(width, 0 if shown is None else shown.num_rows)])
        self._show("foot", (self._foot(width), ""))

    def _show(self, name: str, *lines: tuple[str, Tone]) -> None:
        self.query_one(f"#{name}", LineView).show([ShownLine("", (line,)) for line in lines])

    def _views(self, width: int, num_rows: int) -> ShownLine:
        pieces: list[tuple[str, Tone]] = []
        for name, (key, _) in VIEWS.items():
            if name != "problems" or self._board.view_name == name:
                pieces += [(f"{key} {name}", "sorted" if name == self._board.view_name else ""), (" ", "")]
        used = sum(len(text) for text, _ in pieces)
        place = f"{self.query_one(RowGrid).place}/{num_rows}" if num_rows else ""
        return ShownLine("", (*pieces, (place.rjust(max(0, width - used)), "")) if width - used > len(place) else tuple(pieces))

    def _foot(self, width: int) -> str:
        if self._note and time.monotonic() < self._note_ends:
            return self._note
        acts = [] if self._board.read_only else ["d drain", "u undrain"]
        hints = [
            "? help",
            "enter details",
            "/ filter",
            "q quit",
            *acts,
            "l log",
            "b stacks",
            "p pause",
            ": view",
            "shift+letter sort",
        ]
        line = ""
        for hint in hints:
            if len(line) + len(hint) + 3 <= width:
                line += ("   " if line else "") + hint
        return line

    def _say(self, note: str) -> None:
        self._note, self._note_ends = " ".join(clean(note).split()), time.monotonic() + _NOTE_S
        self._paint()

    def on_key(self, event: Key) -> None:
        """A letter in upper case sorts."""
        letter = event.character or ""
        if len(letter) == 1 and letter.isupper() and letter.isascii():
            event.stop()
            if not self._board.sort(letter):
                self._say(f"no column of {self._board.view_name} has the letter {letter}")
            self._paint()

    def action_view(self, key: str) -> None:
        self._board.choose(key)
        self._paint()

    def action_ask(self, what: str) -> None:
        """Opens the line for a filter or the name of a view."""
        self._asked = what
        asked = self.query_one(Input)
        self.add_class("asks")
        asked.placeholder = "words of rows" if what == "/" else ", ".join(VIEWS)
        asked.value = self._board.filter if what == "/" else ""
        asked.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._asked == "/":
            self._board.filter = event.value
            self._paint()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        asked, value = self._asked, event.value
        self._answered()
        if asked == ":" and value.strip() in ("q", "q!", "quit"):
            self.app.exit()
        elif asked == ":" and value.strip() and not self._board.choose(value):
            self._say(f"no view begins with {value.strip()!r}: there are {', '.join(VIEWS)}")
        self._paint()

    def _answered(self) -> None:
        self._asked = ""
        self.remove_class("asks")
        self.query_one(RowGrid).focus()

    def action_all(self) -> None:
        """Leaves the line that asks, and shows all rows."""
        self._answered()
        self._board.filter = ""
        self._paint()

    def action_pause(self) -> None:
        self._board.paused = not self._board.paused
        self._stopped_at = time.time() if self._board.paused else None
        self._source.pause(self._board.paused)
        self._paint()

    def action_quit(self) -> None:
        self.app.exit()

    def on_row_grid_opened(self) -> None:
        key = self.query_one(RowGrid).chosen
        if (row := self._board.row(key, time.time())) is None:
            return

        async def source(width: int) -> list[str]:
            return details(self._board, key, self._stopped_at or time.time(), width)

        self.app.push_screen(PageScreen(f"{self._board.view_name}: {row.cells[0].text}", source, live=True))

    def action_help(self) -> None:
        async def source(width: int) -> list[str]:
            lines = [f"{keys}: {about}" for keys, about in (*_HELP, *(() if self._board.read_only else _HELP_OF_ACTS))]
            shown = self._board.shown(self.size.width, time.time())
            left_out = "" if shown is None else ", ".join(shown.left_out)
            return [*lines, *(["", f"columns of {self._board.view_name} without room here: {left_out}"] if left_out else [])]

        self.app.push_screen(PageScreen("keys", source))

    def _node(self) -> tuple[str, str]:
        """Returns the node of the chosen row and its address; two empty texts if there is none."""
        row = self._board.row(self.query_one(RowGrid).chosen, time.time())
        if row is None or not row.node_id or self._board.status is None:
            return "", ""
        found = (each.node.address for each in self._board.status.nodes if each.node.node_id == row.node_id)
        return row.node_id, next(found, "")

    def action_log(self) -> None:
        node_id, address = self._node()
        if not node_id:
            self._say("choose a row of a node to see its log")
            return

        async def source(width: int) -> list[str]:
            return [clean(line) for line in await asyncio.to_thread(log_lines, self._logs, node_id, address)]

        self.app.push_screen(PageScreen(clean(f"log of {node_id}"), source, live=True, from_end=True))

    def action_stacks(self) -> None:
        node_id, address = self._node()
        if not address:
            self._say("choose a row of a node that is known to see its stacks")
            return

        async def source(width: int) -> list[str]:
            return await stack_lines(node_id, address, self._dialer)

        self.app.push_screen(PageScreen(clean(f"stacks of {node_id}"), source))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action may be used now: what changes the cluster may not in a watch that is read-only."""
        return not (action == "act" and self._board.read_only)

    @work
    async def action_act(self, act: str) -> None:
        """Asks, and does it."""
        node_id, _ = self._node()
        proposal = propose(NodeAct(act), node_id, self._board.status, read_only=self._board.read_only)
        while isinstance(proposal, Proposal):
            answer = await self.app.push_screen_wait(AskScreen(proposal))
            self._say(f"{act} {node_id} ...")
            done = await self._operator.perform(proposal, answer)
            if isinstance(done, str):
                self._say(done)
                return
            proposal = done
        if isinstance(proposal, Refusal):
            self._say(proposal.why)


class WatchApp(App[None]):
    """The application: one main screen, with pages and questions above it."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]

    def __init__(self, main: Callable[[], MainScreen]) -> None:
        super().__init__(ansi_color=True)
        self._main = main

    def on_mount(self) -> None:
        self.push_screen(self._main())
