"""Machines that a newcomer may have, made of this one: `ryzanstein` runs in each, and the table says how it ended.

Where a machine is made with namespaces, control groups or another user, the tests need root. `--table
FILE` writes the table.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

RYZANSTEIN = str(Path(sys.executable).with_name("ryzanstein"))
START_S = 240.0
SHM = Path("/dev/shm")
_ROWS = pytest.StashKey[list[tuple[str, str, str]]]()
_FREE_PORTS = tuple(part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0"))
QUESTION = {"messages": [{"role": "user", "content": "Count from 1 to 9."}], "temperature": 0}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", metavar="FILE", help="write the table of machines into this document")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes the table if every machine was tried."""
    target = session.config.getoption("--table")
    if target and exitstatus == 0:
        rows = [f"| {machine} | `{command}` | {ending} |" for machine, command, ending in session.config.stash[_ROWS]]
        page = Path(target)
        head, _, rest = page.read_text().partition("<!-- table -->\n")
        _, _, tail = rest.partition("<!-- end of table -->\n")
        table = "\n".join(("| machine | command | ends in |", "|---|---|---|", *rows))
        page.write_text(f"{head}<!-- table -->\n{table}\n<!-- end of table -->\n{tail}")


@pytest.fixture
def ends_in(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Adds a row to the table: the machine, the command, and what it ended in."""
    return lambda machine, command, ending: request.config.stash[_ROWS].append((machine, command, ending))


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """What it said: one sentence, or the test fails."""
        assert "Traceback" not in self.out + self.err, self.out + self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert lines, f"nothing was said, exit code {self.code}"
        return lines[0] if len(lines) == 1 else self.err


@dataclass
class Machine:
    """Where commands run: a prefix that makes the machine, its variables, and its working directory."""

    home: Path
    prefix: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    cwd: Path | None = None
    state_dir: str = ""

    @property
    def environment(self) -> dict[str, str]:
        changed = {"HOME": str(self.home), **self.variables}
        whole = {**os.environ, **{name: value for name, value in changed.items() if value is not None}}
        return {name: value for name, value in whole.items() if name not in changed or changed[name] is not None}

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [*self.prefix, RYZANSTEIN, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(command, text=True, env=self.environment, cwd=self.cwd or self.home, **{**pipes, **options})

    def run(self, *arguments: str, timeout_s: float = START_S) -> Ended:
        with self.popen(*arguments) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                pytest.fail(f"{arguments} did not end: {out}{err}")
            return Ended(process.returncode, out, err)

    @contextmanager
    def up(self, *arguments: str) -> Iterator[Cluster]:
        """A cluster of one node with one rank; on exit nothing of it is left."""
        where = ("--state-dir", self.state_dir or str(self.home / "state"))
        with self.popen("up", "--json", "--nodes", "1", "--tp", "1", *where, *_FREE_PORTS, *arguments) as process:
            cluster = Cluster(process)
            try:
                cluster.wait()
                yield cluster
            finally:
                cluster.end()


class Cluster:
    """A running `ryzanstein up`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.addresses: dict[str, Any] = {}

    def wait(self) -> None:
        """Reads the addresses, which are printed when it serves."""
        assert self.process.stdout is not None
        read = b""
        deadline = time.monotonic() + START_S
        while not read.endswith(b"\n}\n"):
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self.process.stdout.fileno(), 2**16) if readable else b""
            if not more:
                self.process.kill()
                pytest.fail(f"`up` did not serve: {self.process.communicate()[1]}")
            read += more
        self.addresses = json.loads(read)

    def ask(self) -> str:
        """Asks for an answer over HTTP, without any proxy."""
        where = re.fullmatch(r"http://\[?([^\]]+)\]?:(\d+)", self.addresses["http"][0])
        assert where is not None, self.addresses
        connection = http.client.HTTPConnection(where[1], int(where[2]), timeout=120)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION), {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        assert answer.status == 200, text
        return str(json.loads(text)["choices"][0]["message"]["content"])

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it and checks that none of its processes is left."""
        if self.process.poll() is not None:
            return
        family = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        assert left(family[1:]) == []


def left(family: Sequence[Any]) -> list[str]:
    """Who of these processes runs on, a moment later."""
    _, alive = psutil.wait_procs(family, timeout=20)
    names = []
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                names.append(" ".join(each.cmdline()))
    return names


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home, with the caches of this machine: what must be compiled is compiled by one test."""
    cache = tmp_path / "home" / ".cache" / "ryzanstein"
    cache.mkdir(parents=True, mode=0o700)
    ours = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ryzanstein" / "kernels"
    shutil.copytree(ours, cache / "kernels")
    tmp_path.chmod(0o755)
    return tmp_path / "home"


@pytest.fixture
def machine(home: Path) -> Machine:
    """This machine, with a home of its own."""
    return Machine(home, variables={"XDG_CACHE_HOME": None, "XDG_STATE_HOME": None})


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(SHM.iterdir())
    yield
    assert set(SHM.iterdir()) <= before


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    subprocess.run([sys.executable, "-P", "-m", "ryzanstein.worker.kernels", "--quiet"], check=False)


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "only root can make this machine: run make test-machines as root"
        )
