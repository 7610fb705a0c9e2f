"""`python -P -m ryzanstein.lab.sight.terminals docs/images`: pictures of `chat` and of `status --watch`, in a real terminal.

The terminal is tmux's. A node is killed in the middle of an answer, so that both show what that looks like.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.client import Client
from ryzanstein.demo import MODEL_DIR

_SHOWN_S, _LOAD_S = 30.0, 15.0
_FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


@dataclass
class Window:
    """A window of tmux, on a server of its own."""

    socket: str
    columns: int

    def tmux(self, *arguments: str) -> str:
        """Returns what a command of tmux prints."""
        return subprocess.run(["tmux", "-L", self.socket, *arguments], capture_output=True, text=True, check=True).stdout

    def type(self, text: str) -> None:
        """Types a line."""
        self.tmux("send-keys", "-t", "shown", "-l", text)
        self.tmux("send-keys", "-t", "shown", "Enter")

    def wait(self, condition: Callable[[str], bool]) -> None:
        """Returns when the screen is as wanted. Raises TimeoutError."""
        deadline = time.monotonic() + _SHOWN_S
        while not condition(screen := self.tmux("capture-pane", "-p", "-t", "shown")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the terminal shows:\n{screen}")
            time.sleep(0.05)

    def picture(self, title: str) -> str:
        """Returns the screen as SVG. It names no font of another host."""
        screen = self.tmux("capture-pane", "-e", "-p", "-t", "shown").rstrip("\n")
        console = Console(record=True, width=self.columns, file=StringIO(), force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(screen), soft_wrap=True)
        return _FONTS.sub("", console.export_svg(title=title, unique_id=title.replace(" ", "-").replace("--", "")))


@contextmanager
def window(command: str, columns: int, lines: int) -> Iterator[Window]:
    """Yields a window in which a command runs."""
    opened = Window(f"picture-{uuid.uuid4().hex[:8]}", columns)
    opened.tmux("new-session", "-d", "-x", str(columns), "-y", str(lines), "-s", "shown", f"env -u COLUMNS -u LINES {command}")
    opened.tmux("set-option", "-g", "status", "off")
    try:
        yield opened
    finally:
        opened.tmux("kill-server")


def chat(cluster: LocalCluster, home: Path) -> str:
    """Returns a conversation whose second answer moves to another node."""
    command = f"XDG_STATE_HOME={shlex.quote(str(home))} {_program()} chat --router {cluster.router_address} --session tea"
    with window(command, 84, 20) as shown:
        shown.wait(lambda screen: "you" in screen)
        shown.type("My name is Tavik.")
        shown.wait(lambda screen: "first token" in screen)
        shown.type("Count from 1 to 150.")
        shown.wait(lambda screen: " 30 31 " in screen.replace("\n", " "))
        cluster.kill(max(cluster.node_ids, key=lambda name: shown.tmux("capture-pane", "-p", "-t", "shown").rfind(f"{name}: ")))
        shown.wait(lambda screen: screen.count("first token") == 2)
        return shown.picture("ryzanstein chat")


def watch(cluster: LocalCluster) -> str:
    """Returns the state of a cluster that lacks a node, under some load."""
    command = f"{_program()} status --watch --router {cluster.router_address} --orchestrator {cluster.orchestrator_address}"
    with window(command, 110, 16) as shown:
        shown.wait(lambda screen: "nodes" in screen)
        with _load(cluster.router_address):
            time.sleep(_LOAD_S)
            shown.wait(lambda screen: re.search(r"[1-9]\d*/\d+ run.*first token", screen) is not None)
            return shown.picture("ryzanstein status --watch")


@contextmanager
def _load(router: str) -> Iterator[None]:
    """Asks until the end, some questions at once."""
    client, ends = Client(router), threading.Event()

    def ask() -> None:
        while not ends.is_set():
            client.chat("Count from 1 to 150.")

    asking = [threading.Thread(target=ask) for _ in range(6)]
    for each in asking:
        each.start()
    try:
        yield
    finally:
        ends.set()
        for each in asking:
            each.join()
        client.close()


def _program() -> str:
    return str(Path(sys.executable).parent / "ryzanstein")


def main() -> None:
    """Writes both pictures into the folder that the command line names."""
    folder = Path(sys.argv[1])
    if shutil.which("tmux") is None:
        sys.exit("tmux is not installed")
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=3, tp=1)) as cluster, tempfile.TemporaryDirectory() as home:
        (folder / "chat.svg").write_text(chat(cluster, Path(home)))
        (folder / "watch.svg").write_text(watch(cluster))


if __name__ == "__main__":
    main()
