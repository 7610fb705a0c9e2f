"""`ryzanstein status --watch` by typed keys, in a real terminal of tmux, on a real cluster."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(180)]

SHOWN_WITHIN_S = 30.0
HOSTILE = "[red]x[/] $(id)"
SIZES = pytest.mark.parametrize("size", [(60, 20), (120, 40)], ids=["60x20", "120x40"])


@dataclass
class WatchTerminal:
    """A window of tmux, on a server of its own."""

    program: str
    socket: str

    def tmux(self, *arguments: str) -> str:
        command = [self.program, "-L", self.socket, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "watch", *keys)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-t", "watch", "-l", text)

    def screen(self, *more: str) -> str:
        return self.tmux("capture-pane", "-p", *more, "-t", "watch")

    def wait(self, condition: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while not condition(screen := self.screen()):
            assert time.monotonic() < deadline, screen
            time.sleep(0.1)
        return screen

    def sees(self, *parts: str) -> str:
        """Waits until all parts are on the screen, however its lines are folded."""
        return self.wait(lambda screen: all(part in " ".join(screen.replace("│", " ").split()) for part in parts))


Opener = Callable[..., WatchTerminal]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    spec = ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, model_names=(HOSTILE,))
    with LocalCluster(spec) as started:
        yield started


@pytest.fixture
def opened(part: Callable[[str], str], tmp_path: Path, cluster: LocalCluster) -> Iterator[Opener]:
    """Opens a watch of the cluster in a terminal of a size."""
    terminals: list[WatchTerminal] = []

    def open_watch(size: tuple[int, int], *arguments: str, **variables: str) -> WatchTerminal:
        terminal = WatchTerminal(part("tmux"), f"watch-{uuid.uuid4().hex[:8]}")
        terminals.append(terminal)
        program = str(Path(sys.executable).parent / "ryzanstein")
        told = {"XDG_STATE_HOME": str(tmp_path), **variables}
        where = ["--router", cluster.router_address, "--orchestrator", cluster.orchestrator_address]
        command = ["env", "-u", "COLUMNS", "-u", "LINES", *(f"{name}={value}" for name, value in told.items())]
        watch = shlex.join([*command, program, "status", "--watch", *where, *arguments])
        columns, lines = map(str, size)
        terminal.tmux("new-session", "-d", "-x", columns, "-y", lines, "-s", "watch", f"{watch}; echo left $?; sleep 60")
        return terminal

    yield open_watch
    for terminal in terminals:
        terminal.tmux("kill-server")


def names(screen: str) -> list[str]:
    """The nodes of the rows, in their order."""
    return re.findall(r"^(node-\d)  ", screen, re.MULTILINE)


@SIZES
def test_rows_are_sorted_and_filtered(opened: Opener, size: tuple[int, int]) -> None:
    terminal = opened(size)
    screen = terminal.sees("2/2 nodes ready", "no problems")
    assert names(screen) == ["node-0", "node-1"]
    assert HOSTILE in screen, "markup is text"
    terminal.press("N")
    assert names(terminal.wait(lambda screen: "▼" in screen)) == ["node-1", "node-0"]
    terminal.press("/")
    terminal.type("node-0")
    terminal.press("Enter")
    terminal.wait(lambda screen: names(screen) == ["node-0"] and "filter: node-0" in screen)
    terminal.press("Escape")
    terminal.wait(lambda screen: names(screen) == ["node-1", "node-0"])
    terminal.press("3")
    terminal.sees("Context", HOSTILE)
    terminal.press("q")
    terminal.sees("left 0")


@SIZES
def test_a_drain_is_refused_and_confirmed(opened: Opener, size: tuple[int, int]) -> None:
    terminal = opened(size)
    terminal.sees("2/2 nodes ready")
    terminal.press("d")
    terminal.sees("Drain node-0? (y/n)", "node-0 runs no generation; new ones go to other nodes.")
    terminal.press("n")
    terminal.sees("nothing was changed")
    terminal.sees("2/2 nodes ready")
    terminal.press("d")
    terminal.sees("Drain node-0? (y/n)")
    terminal.press("y")
    terminal.sees("node-0 is draining")
    terminal.sees("1/2 nodes ready", "DRAINING")
    terminal.press("Down", "d")
    terminal.sees("node-1 is the last ready node of", "Type node-1 to drain it")
    terminal.type("node-0")
    terminal.press("Enter")
    terminal.sees("nothing was changed", "1/2 nodes ready")
    terminal.press("Up", "u")
    terminal.sees("node-0 takes work again.")
    terminal.press("y")
    terminal.sees("2/2 nodes ready", "no problems")


def test_a_watch_that_is_read_only_drains_nothing(opened: Opener) -> None:
    terminal = opened((60, 20), "--read-only")
    terminal.sees("2/2 nodes ready", "read-only")
    terminal.press("d")
    terminal.press("y")
    terminal.press("p")
    assert "drain" not in terminal.sees("PAUSED")
    terminal.press("p")
    terminal.wait(lambda screen: "PAUSED" not in screen)
    assert "2/2 nodes ready" in terminal.screen()


def test_a_silent_node_turns_old_while_keys_work_and_comes_back(opened: Opener, cluster: LocalCluster) -> None:
    terminal = opened((60, 20))
    terminal.sees("2/2 nodes ready")
    pid = cluster.services["node-1"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        terminal.sees("node-1 no answer", "1/2 nodes ready")
        for key, word in (("2", "pHase"), ("3", "Context"), ("1", "no answer")):
            began = time.monotonic()
            terminal.press(key)
            terminal.sees(word)
            assert time.monotonic() - began < 1.5, "a silent service does not hold up a key"
        screen = terminal.wait(lambda screen: bool(re.search(r"^node-1 +no answer.* \d+ s$", screen, re.MULTILINE)))
        assert names(screen) == ["node-0", "node-1"]
        coloured = next(line for line in terminal.screen("-e").splitlines() if "node-1" in line and "no answer" in line)
        assert "\x1b[90m" in coloured
    finally:
        os.kill(pid, signal.SIGCONT)
    terminal.sees("2/2 nodes ready")
    terminal.wait(lambda screen: not re.search(r"^node-1.* \d+ s$", screen, re.MULTILINE))


def test_without_colours_no_colour_is_sent(opened: Opener) -> None:
    terminal = opened((60, 20), NO_COLOR="1")
    terminal.sees("2/2 nodes ready")
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38|48)", terminal.screen("-e"))


def test_a_dumb_terminal_gets_lines(opened: Opener) -> None:
    terminal = opened((120, 40), TERM="dumb")
    screen = terminal.sees("service router: answers", "node node-0 state: READY")
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  node node-0 state: READY$", screen, re.MULTILINE)
    terminal.press("C-c")
    terminal.sees("left 0")


def test_it_survives_a_terminal_that_becomes_tiny(opened: Opener) -> None:
    terminal = opened((60, 20))
    terminal.sees("2/2 nodes ready")
    terminal.tmux("resize-window", "-t", "watch", "-x", "20", "-y", "5")
    terminal.wait(lambda screen: len(screen.splitlines()) == 5 and "2/2 nodes ready" in screen)
    terminal.tmux("resize-window", "-t", "watch", "-x", "60", "-y", "20")
    terminal.sees("1 nodes 2 ranks 3 models", "? help")
