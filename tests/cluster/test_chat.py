"""`ryzanstein chat` by typed keys, in a real terminal of tmux, on a real cluster."""

from __future__ import annotations

import shlex
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(180)]

SHOWN_WITHIN_S = 30.0


@dataclass
class Terminal:
    """A window of tmux, on a server of its own."""

    program: str
    socket: str
    command: str = ""

    def tmux(self, *arguments: str) -> str:
        command = [self.program, "-L", self.socket, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    def type(self, text: str, *keys: str) -> None:
        self.tmux("send-keys", "-t", "chat", "-l", text)
        for key in keys or ("Enter",):
            self.press(key)

    def again(self) -> None:
        """Begins a second chat, on an empty screen."""
        self.tmux("respawn-pane", "-k", "-t", "chat", self.command)
        self.tmux("clear-history", "-t", "chat")
        self.wait(lambda screen: "you" in screen and "left" not in screen)

    def press(self, key: str) -> None:
        self.tmux("send-keys", "-t", "chat", key)

    def screen(self) -> str:
        """What is shown, with what has scrolled away."""
        return self.tmux("capture-pane", "-p", "-t", "chat", "-S", "-500")

    def answering(self, node_ids: Sequence[str]) -> str:
        """The node that gave the last answer."""
        screen = self.screen()
        return max(node_ids, key=lambda node_id: screen.rfind(f"{node_id}: first token"))

    def wait(self, condition: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while not condition(screen := self.screen()):
            assert time.monotonic() < deadline, screen
            time.sleep(0.1)
        return screen


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1)) as started:
        yield started


@pytest.fixture(params=[(60, 20), (120, 40)], ids=["60x20", "120x40"])
def terminal(
    request: pytest.FixtureRequest, part: Callable[[str], str], tmp_path: Path, cluster: LocalCluster
) -> Iterator[Terminal]:
    columns, lines = request.param
    made = Terminal(part("tmux"), f"chat-{uuid.uuid4().hex[:8]}")
    program = Path(sys.executable).parent / "ryzanstein"
    home = f"XDG_STATE_HOME={shlex.quote(str(tmp_path))}"
    chat = f"env -u COLUMNS -u LINES {home} {program} chat --router {cluster.router_address}"
    command = f"{chat}; echo left $?; sleep 60"
    made.command = command
    made.tmux("new-session", "-d", "-x", str(columns), "-y", str(lines), "-s", "chat", command)
    made.wait(lambda screen: "you" in screen)
    yield made
    made.tmux("kill-server")


def test_a_conversation(terminal: Terminal, cluster: LocalCluster, tmp_path: Path) -> None:
    terminal.type("My name is Tavik.")
    terminal.wait(lambda screen: "first token" in screen)
    terminal.type("What is\\", "Enter")
    terminal.type("my name?")
    screen = terminal.wait(lambda screen: screen.count("first token") == 2)
    assert "... my name?" in screen, "one message of two lines"

    terminal.type("/tokens")
    terminal.wait(lambda screen: "tokens in session" in screen)
    terminal.type("/set temperature warm")
    terminal.wait(lambda screen: "temperature must be a number" in screen)
    terminal.type("/nonsense")
    terminal.wait(lambda screen: "there is no such command" in screen)

    terminal.type("Count from 1 to 200.")
    terminal.wait(lambda screen: "1 2 3 4 5" in screen)
    terminal.press("C-c")
    screen = terminal.wait(lambda screen: "stopped; " in screen)
    assert screen.count("1 2 3 4 5 6") == 1, "what was laid out again is not left behind"
    terminal.type("What is my name?")
    screen = terminal.wait(lambda screen: screen.count("first token") == 4)
    assert "Your name is Tavik." in screen

    terminal.press("C-d")
    terminal.wait(lambda screen: "left 0" in screen)
    history = tmp_path / "ryzanstein" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "My name is Tavik." in history.read_text()


def test_what_is_pasted_is_one_message_and_history_outlives_a_chat(terminal: Terminal, cluster: LocalCluster) -> None:
    terminal.tmux("set-buffer", "My name is Tavik.\nI like tea.\n\tWhat is my name?")
    terminal.tmux("paste-buffer", "-p", "-t", "chat")
    terminal.wait(lambda screen: "What is my name?" in screen)
    terminal.press("Enter")
    screen = terminal.wait(lambda screen: "first token" in screen)
    assert screen.count("first token") == 1, "its lines are not messages of their own"
    terminal.type("Count from 1 to 3.")
    terminal.wait(lambda screen: screen.count("first token") == 2)
    terminal.press("C-d")
    terminal.wait(lambda screen: "left 0" in screen)

    terminal.again()
    terminal.press("Up")
    terminal.wait(lambda screen: "Count from 1 to 3." in screen)
    terminal.press("Up")
    terminal.press("Up")
    screen = terminal.wait(lambda screen: "My name is Tavik." in screen)
    assert "I like tea." in screen, "a message of several lines comes back whole"
    terminal.press("C-c")
    terminal.wait(lambda screen: "left 130" in screen)


def test_a_failover_is_one_line(terminal: Terminal, cluster: LocalCluster) -> None:
    """On a fast machine an answer may be complete before its node is killed: then it is asked for once more."""
    terminal.type("Hello!")
    terminal.wait(lambda screen: "first token" in screen)
    for num_answers in range(2, 7):
        node_id = terminal.answering(cluster.node_ids)
        (other,) = set(cluster.node_ids) - {node_id}
        terminal.type("Count from 1 to 150.")
        terminal.wait(lambda screen, num=num_answers: screen.count("1 2 3 4 5") >= num - 1)
        cluster.kill(node_id)
        try:
            screen = terminal.wait(lambda screen, num=num_answers: screen.count("first token") == num)
        finally:
            cluster.restart(node_id)
            cluster.wait_nodes(2)
        if " after " in screen:
            break
    assert screen.count(f"{node_id} -> {other} after") == 1
    assert " ".join(map(str, range(1, 151))) in " ".join(screen.split())
    terminal.press("C-c")
    terminal.wait(lambda screen: "left 130" in screen)
