"""The screen of a watch by its keys, without a terminal: what is shown, what is painted, and what is asked."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from ryzanstein.cli.watch.actions import Operator
from ryzanstein.cli.watch.board import WatchBoard
from ryzanstein.cli.watch.rows import VIEWS
from ryzanstein.cli.watch.screen.app import MainScreen, WatchApp, WatchSource
from ryzanstein.cli.watch.screen.lines import RowGrid
from ryzanstein.cli.watch.screen.panels import AskScreen, PageScreen
from ryzanstein.cluster import ModelReport, Node, NodeState
from ryzanstein.rpc.client import PLAIN

pytestmark = pytest.mark.long
SIZES = [(60, 20), (120, 40)]
WITHIN_S = 20.0


@dataclass
class Screen:
    """A watch whose samples a test tells, and its screen."""

    pilot: Pilot[None]
    script: Any
    board: WatchBoard

    @property
    def text(self) -> str:
        """What is on the screen, line by line."""
        screen = self.pilot.app.screen
        height = screen.size.height
        return "\n".join(
            "".join(segment.text for segment in line).rstrip() for line in screen._compositor.render_strips()[:height]
        )

    @property
    def grid(self) -> RowGrid:
        return self.pilot.app.screen_stack[1].query_one(RowGrid)

    async def tell(self, status: Any) -> None:
        before = self.board.status
        self.script.tell(status)
        await self.until(lambda: self.board.status is not before)
        await self.pilot.pause(0.4)

    async def press(self, *keys: str) -> str:
        await self.pilot.press(*keys)
        await self.pilot.pause()
        return self.text

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, self.text
            await self.pilot.pause(0.02)

    async def sees(self, part: str) -> None:
        await self.until(lambda: part in self.text)


Opener = Callable[..., Any]


@pytest.fixture
def opened(script: Any, tmp_path: Path) -> Opener:
    """Opens a watch on a screen of a size."""

    @asynccontextmanager
    async def open_watch(
        size: tuple[int, int], orchestrator: str = "127.0.0.1:1", *, read_only: bool = False
    ) -> AsyncIterator[Screen]:
        told = script()
        board = WatchBoard("a cluster", read_only)
        source = WatchSource(told.samples, told.pauses.append)
        operator = Operator(orchestrator, PLAIN, read_only=read_only)
        app = WatchApp(lambda: MainScreen(board, source, operator, PLAIN, tmp_path))
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            yield Screen(pilot, told, board)

    return open_watch


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_every_view_is_shown_by_its_key_and_fits(opened: Opener, scene: Any, size: tuple[int, int]) -> None:
    async with opened(size) as screen:
        assert "nobody has answered yet: a cluster" in screen.text
        await screen.tell(scene.cluster(scene.node("node-0", 3), scene.node("node-1", error="UNAVAILABLE: refused")))
        for name, (key, _) in VIEWS.items():
            text = await screen.press(key)
            assert screen.board.view_name == name
            lines = text.splitlines()
            assert len(lines) == size[1]
            assert max(map(len, lines)) <= size[0]
            assert lines[0].startswith("1/2 nodes ready, 3/64 run, 0 wait")
            assert lines[1] == "node-1 does not answer: UNAVAILABLE: refused"
            assert f"{key} {name}"[: None if size[0] > 60 else 1] in lines[3]
            assert "? help" in lines[-1]
        assert "node-0  READY" in await screen.press("1")
        assert ("KV blocks".lower() in screen.text.lower()) == (size[0] == 120)


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_letters_sort_and_the_chosen_row_stays_chosen(opened: Opener, scene: Any, size: tuple[int, int]) -> None:
    async with opened(size) as screen:
        await screen.tell(scene.cluster(scene.node("node-0", 3), scene.node("node-1", 9), scene.node("node-2", 1)))

        def order() -> list[str]:
            return [line.key for line in screen.grid.lines]

        await screen.press("down", "down")
        assert screen.grid.chosen == "node-2"
        await screen.press("R")
        assert order() == ["node-1", "node-0", "node-2"]
        await screen.press("R")
        assert order() == ["node-2", "node-0", "node-1"]
        assert "Running▲" in screen.text
        assert screen.grid.chosen == "node-2"
        assert "no column of nodes has the letter Z" in await screen.press("Z")


async def test_a_filter_is_typed_and_esc_ends_it(opened: Opener, scene: Any) -> None:
    async with opened((60, 20)) as screen:
        await screen.tell(scene.cluster(*(scene.node(f"node-{at}") for at in range(3))))
        text = await screen.press("slash", *"node-2")
        assert ("node-1" in text, "node-2" in text) == (False, True)
        await screen.press("enter")
        assert screen.grid.has_focus
        assert "filter: node-2" in screen.text
        assert "no row has 'q'" in await screen.press("slash", *["backspace"] * 6, "q"), "a letter in the line is no key"
        assert "node-1" in await screen.press("escape")
        assert "filter:" not in screen.text


async def test_a_view_is_chosen_by_its_name(opened: Opener, scene: Any) -> None:
    async with opened((60, 20)) as screen:
        await screen.tell(scene.cluster(scene.node("node-0")))
        await screen.press("colon", *"los", "enter")
        assert screen.board.view_name == "losses"
        assert "nothing was lost" in screen.text
        assert "no view begins with 'x'" in await screen.press("colon", "x", "enter")
        await screen.press("colon", "q", "enter")
        assert not screen.pilot.app.is_running or screen.pilot.app._exit


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_only_rows_that_changed_are_painted(opened: Opener, scene: Any, size: tuple[int, int]) -> None:
    async with opened(size) as screen:
        nodes = [scene.node(f"node-{at}", 8) for at in range(10)]
        for _ in range(65):  # until the charts are full, and a constant load does not change them
            screen.board.take(scene.cluster(*nodes), time.time())
        await screen.tell(scene.cluster(*nodes))
        before = screen.grid.painted
        await screen.tell(scene.cluster(*nodes))
        await screen.pilot.pause(1.2)
        assert screen.grid.painted == before, "nothing changed"
        nodes[4] = scene.node("node-4", 9)
        await screen.tell(scene.cluster(*nodes))
        assert screen.grid.painted == before + 1


async def test_at_most_four_frames_a_second_are_painted(opened: Opener, scene: Any) -> None:
    async with opened((120, 40)) as screen:
        await screen.tell(scene.cluster(scene.node("node-0", 0)))
        before, began = screen.grid.painted, time.monotonic()
        for at in range(100):
            screen.script.tell(scene.cluster(scene.node("node-0", at % 64)))
            await asyncio.sleep(0.01)
        await screen.pilot.pause(0.3)
        frames = screen.grid.painted - before
        assert 2 <= frames <= 4 * (time.monotonic() - began) + 1


async def test_a_silent_node_is_grey_with_its_age_and_comes_back(opened: Opener, scene: Any) -> None:
    async with opened((60, 20)) as screen:
        await screen.tell(scene.cluster(scene.node("node-0"), scene.node("node-1")))
        await screen.tell(scene.cluster(scene.node("node-0"), scene.node("node-1", error="DEADLINE_EXCEEDED: late")))
        await screen.sees("no answer")
        await screen.until(lambda: re.search(r"no answer.* [1-9] s$", screen.text, re.MULTILINE) is not None)
        old = screen.grid.lines[1]
        assert {tone for text, tone in old.pieces if text.strip()} == {"silent"}
        await screen.tell(scene.cluster(scene.node("node-0"), scene.node("node-1")))
        assert "silent" not in {tone for line in screen.grid.lines for _, tone in line.pieces}


async def test_keys_work_while_nobody_answers(opened: Opener) -> None:
    async with opened((60, 20)) as screen:
        await screen.press("3")
        assert screen.board.view_name == "models"
        assert "shift+letter" in await screen.press("question_mark")
        await screen.press("escape", "d")
        await screen.sees("the orchestrator does not answer: drain needs it")


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (300, 80)], ids=str)
async def test_a_screen_of_any_size_is_survived(opened: Opener, scene: Any, size: tuple[int, int]) -> None:
    async with opened((60, 20)) as screen:
        await screen.tell(scene.cluster(*(scene.node(f"a-node-with-a-long-name-{at}") for at in range(30))))
        await screen.press("end")
        await screen.pilot.resize_terminal(*size)
        for key, _ in VIEWS.values():
            await screen.press(key, "down", "enter", "escape")
        await screen.pilot.resize_terminal(60, 20)
        await screen.press("1")
        await screen.sees("a-node-with")


async def test_enter_opens_a_row_and_it_stays_up_to_date(opened: Opener, scene: Any) -> None:
    async with opened((60, 20)) as screen:
        await screen.tell(scene.cluster(scene.node("node-0", 3)))
        await screen.press("enter")
        assert isinstance(screen.pilot.app.screen, PageScreen)
        await screen.sees("running      3/64")
        await screen.sees("rank 1: idle, step 7, process 101")
        await screen.tell(scene.cluster(scene.node("node-0", 4)))
        await screen.sees("running      4/64")
        await screen.press("escape")
        assert isinstance(screen.pilot.app.screen, MainScreen)


async def test_pause_keeps_what_is_shown(opened: Opener, scene: Any) -> None:
    async with opened((60, 20)) as screen:
        await screen.tell(scene.cluster(scene.node("node-0", 3)))
        assert "PAUSED" in await screen.press("p")
        screen.script.tell(scene.cluster(scene.node("node-0", 4)))
        await screen.pilot.pause(0.6)
        assert "3/64" in screen.text
        assert "PAUSED" not in await screen.press("p")
        await screen.tell(scene.cluster(scene.node("node-0", 5)))
        assert "5/64" in screen.text
        assert screen.script.pauses == [True, False]


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_names_of_others_are_shown_literally(opened: Opener, scene: Any, size: tuple[int, int]) -> None:
    async with opened(size) as screen:
        hostile = "[red]x[/]"
        node = scene.node(hostile, model="[bold]m[/bold]", error="[link=file:///]e[/link]\x1b[2J")
        await screen.tell(scene.cluster(node, scene.node("node-1"), errors={"orchestrator": "[blink]down[/blink]"}))
        assert hostile in screen.text
        assert "orchestrator does not answer: [blink]down[/blink]" in screen.text
        told = screen.text.splitlines()[2]
        assert told.startswith(f"{hostile} does not answer: [lin")
        assert size[0] == 60 or "[link=file:///]e[/link][2J" in told
        await screen.press("enter")
        await screen.sees("[bold]m[/bold]")
        assert f"nodes: {hostile}   (esc: back)" in screen.text
        await screen.press("escape", "b")
        await screen.sees(f"$ ryzanstein debug {hostile}")
        await screen.press("escape", "l")
        await screen.sees(f"ryzanstein logs --node {hostile} --state-dir DIR")


def member(node_id: str) -> Node:
    return Node(
        node_id, "", state=NodeState.READY, model="demo", models=(ModelReport("demo", state=NodeState.READY),), memory_bytes=1
    )


async def test_a_drain_is_asked_for_and_done(opened: Opener, scene: Any, orchestrator: Any) -> None:
    orchestrator.nodes = [member("node-0"), member("node-1")]
    async with opened((60, 20), orchestrator.address) as screen:
        await screen.tell(scene.cluster(scene.node("node-0", 3), scene.node("node-1")))
        await screen.press("d")
        await screen.sees("node-0 runs 3 generations")
        await screen.press("n")
        await screen.sees("nothing was changed")
        assert orchestrator.drained == []
        await screen.press("d")
        await screen.sees("Drain node-0? (y/n)")
        await screen.press("y")
        await screen.sees("node-0 is draining")
        assert orchestrator.drained == [("node-0", True)]


async def test_the_last_ready_node_has_to_be_typed(opened: Opener, scene: Any, orchestrator: Any) -> None:
    orchestrator.nodes = [member("node-0")]
    async with opened((60, 20), orchestrator.address) as screen:
        await screen.tell(scene.cluster(scene.node("node-0")))
        await screen.press("d")
        await screen.sees("Type node-0 to drain it")
        await screen.press("y", "enter")
        await screen.sees("nothing was changed")
        await screen.press("d")
        await screen.sees("Type node-0 to drain it")
        await screen.press("escape")
        await screen.sees("nothing was changed")
        assert orchestrator.drained == []
        await screen.press("d")
        await screen.sees("Type node-0 to drain it")
        assert screen.pilot.app.screen.query_one(Input).has_focus
        await screen.press(*"node-0", "enter")
        await screen.sees("node-0 is draining")
        assert orchestrator.drained == [("node-0", True)]


async def test_a_failed_act_is_one_line(opened: Opener, scene: Any) -> None:
    async with opened((120, 40)) as screen:
        await screen.tell(scene.cluster(scene.node("node-0"), scene.node("node-1", drained=True)))
        await screen.press("down", "u")
        await screen.sees("node-1 takes work again.")
        await screen.press("y")
        await screen.sees("undrain failed, UNAVAILABLE: ")


async def test_a_watch_that_is_read_only_has_no_acts(opened: Opener, scene: Any, orchestrator: Any) -> None:
    orchestrator.nodes = [member("node-0"), member("node-1")]
    async with opened((120, 40), orchestrator.address, read_only=True) as screen:
        await screen.tell(scene.cluster(scene.node("node-0"), scene.node("node-1")))
        assert "drain" not in screen.text
        for key in ("d", "u"):
            await screen.press(key)
            await screen.pilot.pause(0.2)
            assert not isinstance(screen.pilot.app.screen, AskScreen)
            assert "nothing was changed" not in screen.text, "the key does nothing at all"
        assert "drain" not in await screen.press("question_mark")
        await screen.press("escape")
        main = screen.pilot.app.screen
        assert isinstance(main, MainScreen)
        main.action_act("drain")  # a key table that was wrong
        await screen.sees("this watch is read-only: nothing was changed")
        assert orchestrator.drained == []


async def test_the_log_of_a_node_on_this_machine_is_shown(opened: Opener, scene: Any, tmp_path: Path) -> None:
    node = scene.node("node-0")
    port = int(node.node.address.rpartition(":")[2])
    record = '{"event": "serving", "grpc_port": %d, "timestamp": "2030-01-31T12:00:00Z", "level": "info"}\n'
    (tmp_path / "node-0.log").write_text(record % port)
    (tmp_path / "node-10.log").write_text(record % 1)
    async with opened((120, 40)) as screen:
        await screen.tell(scene.cluster(node, scene.node("node-10")))
        await screen.press("l")
        await screen.sees("12:00:00.000  info     node-0  serving")
        await screen.press("escape", "down", "l")
        await screen.sees("No log in")
        await screen.sees("ryzanstein logs --node node-10 --state-dir DIR")
