"""Reads a runbook page and lives through it: the fault is made, each expression must fire, each command must show what the
page shows.

A page's blocks run in order. `console` blocks hold commands (`$ ...`) and lines of their output, in which `...` stands for
anything and runs of spaces for any; `promql` blocks hold one expression each, which a real Prometheus evaluates and which must
say more than before the fault. Outside of "Do" a command is asked again until it shows that, because detection takes a
moment; in "Do" it runs once. The Prometheus has the rules of k8s/components/monitoring, without their waits: an alert of the
page fires, too.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.stage.plan import INJECTION_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

FOLDER = Path(__file__).parents[3] / "docs" / "operate" / "runbooks"
RULES = sorted((Path(__file__).parents[3] / "k8s" / "components" / "monitoring" / "rules").glob("*.yaml"))
SECTIONS = ("Symptom", "What fires", "Look", "Do", "Over")
SHOWS_S = 30.0
SCRAPED_S = 3  # of a window: at least two samples are before the strike
COMMAND_S = 45.0
IDLE_WITHIN_S = 60.0
RETRY_S = 0.02
BUSY = ("ryzanstein_router_generations_running", "ryzanstein_worker_running", "ryzanstein_worker_class_waiting")


@dataclass(frozen=True)
class Command:
    """A command of a page and the lines of output that the page shows."""

    text: str
    lines: tuple[str, ...]

    def matches(self, output: str) -> bool:
        """Whether the lines are there, in this order."""
        at = 0
        for line in self.lines:
            found = re.compile(_as_pattern(line)).search(output, at)
            if found is None:
                return False
            at = found.end()
        return True


def _as_pattern(line: str) -> str:
    parts = (r"\s*".join(map(re.escape, part.split())) for part in line.split("..."))
    return r"[^\n]*".join(parts)


@dataclass(frozen=True)
class Page:
    """A runbook page: its fault ids and its blocks by section."""

    name: str
    text: str
    faults: frozenset[str]
    blocks: dict[str, list[tuple[str, str]]]

    @classmethod
    def read(cls, path: Path) -> Page:
        text = path.read_text()
        listed = re.search(r"^Faults: (.*?)\.$", text, re.MULTILINE | re.DOTALL)
        faults = re.findall(r"`([a-z0-9_]+)`", listed[1]) if listed else []
        parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        blocks = {name: re.findall(r"^```(\w+)\n(.*?)^```", body, re.MULTILINE | re.DOTALL) for name, body in sections.items()}
        return cls(path.name, text, frozenset(faults), blocks)

    def expressions(self) -> list[str]:
        return [" ".join(text.split()) for blocks in self.blocks.values() for kind, text in blocks if kind == "promql"]

    def commands(self, section: str) -> list[Command]:
        return [command for kind, text in self.blocks.get(section, ()) if kind == "console" for command in _commands(text)]


def _commands(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        first, *visible = part.splitlines()
        yield Command(first, tuple(line for line in visible if line.strip(" .")))


class Prometheus:
    """A real one that scrapes a cluster each second. Its alerts go to `alertmanager`, where a test may start one."""

    def __init__(self, program: str, folder: Path, cluster: LocalCluster) -> None:
        port, alertmanager_port = free_ports(2)
        self.url, self.alertmanager = f"http://127.0.0.1:{port}", f"127.0.0.1:{alertmanager_port}"
        _write_rules(folder / "rules")
        (folder / "prometheus.yml").write_text(_configuration(cluster, folder / "rules", self.alertmanager))
        command = (
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        )
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self, services: int) -> None:
        """Returns when each service was scraped twice, so that there is something to compare with."""
        deadline = time.monotonic() + 30
        while not self._has_seen(services):
            assert self._process.poll() is None, "prometheus ended"
            assert time.monotonic() < deadline, "prometheus has not scraped every service"
            time.sleep(0.1)

    def _has_seen(self, services: int) -> bool:
        try:
            return len(self.ask("count_over_time(up[1m]) >= 2 and up == 1")) == services
        except OSError:
            return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def ask(self, expression: str) -> list[float]:
        """The values of the result; ValueError with Prometheus' own words when it is no expression."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=10) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as refused:
            if refused.code not in (400, 422):  # not ready yet
                raise
            with refused:
                raise ValueError(f"{expression}: {refused.read().decode()}") from None
        return [float(series["value"][1]) for series in answer["data"]["result"]]


def _write_rules(folder: Path) -> None:
    """The rules as they are, but no alert waits."""
    folder.mkdir()
    for path in RULES:
        (folder / path.name).write_text(re.sub(r"^ +for: .*\n", "", path.read_text(), flags=re.MULTILINE))


def _alerts_of(page: str) -> list[str]:
    """The alerts whose runbook is the page."""
    text = "\n".join(path.read_text() for path in RULES)
    return [
        name for name, url in re.findall(r"- alert: (\w+)$.*?runbook_url: (\S+)$", text, re.M | re.S) if Path(url).name == page
    ]


def _configuration(cluster: LocalCluster, rules: Path, alertmanager: str) -> str:
    kinds = {"router": cluster.router_names, "worker": cluster.node_ids, "orchestrator": ["orchestrator"]}
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [_host(cluster.services[name].metrics_url) for name in names]}]}
        for job, names in kinds.items()
    ]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    alerting = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return json.dumps({"global": every, "rule_files": [f"{rules}/*.yaml"], "scrape_configs": jobs, "alerting": alerting})


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


@dataclass
class Load:
    """Clients that stream long answers all the time, each a thread, from `start` to `close`, or inside `with`.

    `distinct`: no two ask for the same. `ends`: the answers end by themselves. `failures`: what they could not finish;
    `answering`: the node that gave each client its last token.
    """

    addresses: list[str]
    clients: int = 3
    distinct: bool = False
    ends: bool = False
    failures: list[str] = field(default_factory=list)
    finished: int = 0
    answering: dict[str, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.clients)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """May be called again."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_on(self, node_id: str) -> None:
        """Returns in the middle of an answer of this node."""
        deadline = time.monotonic() + 30
        while node_id not in self.answering.values():
            assert time.monotonic() < deadline, f"{node_id} answers nobody: {self.answering}, {self.failures}"
            time.sleep(0.01)

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            if self._stop.is_set():
                return
            with grpc.insecure_channel(self.addresses[number % len(self.addresses)]) as channel:
                self._ask(inference_grpc.InferenceServiceStub(channel), f"load-{number}-{turn}")

    def _ask(self, stub: Any, user: str) -> None:
        message = inference.Message(role=inference.ROLE_USER, content=f"{user}. " * self.distinct + "Count from 1 to 60.")
        sampling = inference.SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=not self.ends)
        chat = inference.ChatRequest(messages=[message], user=user, sampling=sampling)
        seen = 0
        try:
            for response in stub.StreamChat(inference.StreamChatRequest(chat=chat), timeout=60):
                delta = response.event.delta
                if response.event.HasField("delta"):
                    assert delta.first_index == seen, "a token was lost or repeated"
                    seen += len(delta.token_ids)
                    self.answering[user.rpartition("-")[0]] = delta.node_id
                if self._stop.is_set():
                    return
            assert seen == 120 or self.ends
            self.finished += 1
            del self.answering[user.rpartition("-")[0]]
        except (grpc.RpcError, AssertionError) as failure:
            self.failures.append(str(failure))
            self._stop.wait(RETRY_S)


class Line:
    """The laboratory's TCP proxy in front of an address: as it is, delayed, or silent."""

    def __init__(self, target: str) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        command = (sys.executable, "-m", "ryzanstein.lab.chaos.machines.proxy", self.address, target)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hear("ready")

    def tell(self, command: str) -> None:
        """`pass`, `blackhole` or `delay SECONDS`; returns when it is so."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """What is started meanwhile inherits these."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@dataclass
class World:
    """A cluster, what watches it, and the variables that pages use. `to_orchestrator`: the line that nodes have to it."""

    cluster: LocalCluster
    prometheus: Prometheus
    folder: Path
    to_orchestrator: Line

    def variables(self, node_id: str, **more: str) -> dict[str, str]:
        """As docs/operate/runbooks/README.md explains them."""
        services = self.cluster.services
        router = services[self.cluster.router_names[0]]
        return {
            "RYZANSTEIN_ROUTER": self.cluster.router_address,
            "RYZANSTEIN_ORCHESTRATOR": self.cluster.orchestrator_address,
            "ROUTER": "router-0",
            "ROUTER_URL": self.cluster.http_url,
            "ROUTER_METRICS": router.metrics_url,
            "ORCHESTRATOR_METRICS": services["orchestrator"].metrics_url,
            "NODE": node_id,
            "NODE_ADDRESS": services[node_id].grpc_address,
            "NODE_METRICS": services[node_id].metrics_url,
            "PID": str(services[node_id].pid),
            "LOGS": str(self.cluster.state_dir),
            "STATE": str(self.cluster.state_dir / "router-0"),
            **more,
        }

    def ranks(self, node_id: str) -> Sequence[worker.RankStatus]:
        with grpc.insecure_channel(self.cluster.services[node_id].grpc_address) as channel:
            return worker_grpc.WorkerServiceStub(channel).GetStatus(worker.GetStatusRequest(), timeout=10).ranks

    def wait_idle(self) -> None:
        """Until Prometheus saw that no generation runs: those that a load left behind wait for their readers for a while."""
        deadline = time.monotonic() + IDLE_WITHIN_S
        while any(self.prometheus.ask(f"sum({gauge}) > 0") for gauge in BUSY):
            assert time.monotonic() < deadline, "generations do not end"
            time.sleep(0.3)

    def load(self, clients: int = 3, *, distinct: bool = False, ends: bool = False) -> Load:
        return Load(self.cluster.router_addresses[:1], clients, distinct, ends)


class Walk:
    """Walks through a page in a world."""

    def __init__(self, world: World, page: Page, variables: dict[str, str]) -> None:
        self.world, self.page, self.variables = world, page, variables

    def run(self, strike: Callable[[], None], heal: Callable[[], None] = lambda: None, load: Load | None = None) -> None:
        """Before the fault, during it, after "Do" (`heal` does what a supervisor would), and at its end.

        With a load the fault strikes in the middle of an answer of $NODE.
        """
        before = {expression: self.world.prometheus.ask(expression) for expression in self.page.expressions()}
        if load is not None:
            load.wait_on(self.variables["NODE"])
        struck = time.monotonic()
        strike()
        for section in ("What fires", "Look"):
            self._show(section)
        for expression, values in before.items():
            self._fires(expression, values, struck)
        self._alerts()
        for command in self.page.commands("Do"):
            done = self._execute(command.text)
            assert done.returncode == 0, f"{self.page.name}: $ {command.text}\n{done.stdout}{done.stderr}"
            assert self._in(command).matches(done.stdout + done.stderr), f"{command}\n{done.stdout}{done.stderr}"
        heal()
        self._show("Over")

    def _show(self, section: str) -> None:
        for command in self.page.commands(section):
            self._shows(section, command)

    def _shows(self, section: str, command: Command) -> None:
        expected = self._in(command)
        deadline = time.monotonic() + SHOWS_S
        while True:
            done = self._execute(command.text)
            wording = done.stdout + done.stderr
            if done.returncode == 0 and expected.matches(wording):
                return
            if time.monotonic() > deadline:
                visible = "\n".join(expected.lines)
                pytest.fail(
                    f"{self.page.name}, {section}: $ {command.text}\nshown:\n{visible}\nsaid ({done.returncode}):\n{wording}"
                )
            time.sleep(0.3)

    def _fires(self, expression: str, before: list[float], struck: float) -> None:
        """Waits until an expression fires. What counts events counts those since the strike: earlier ones leave its window."""
        deadline = time.monotonic() + SHOWS_S
        while time.monotonic() < deadline:
            if "increase(" in expression:
                window_s = math.ceil(time.monotonic() - struck) + SCRAPED_S
                now = self.world.prometheus.ask(re.sub(r"\[\d+m\]", f"[{window_s}s]", expression))
                fired = any(now)
            elif " unless " in expression:  # it fires where nothing happens: some seconds without it are enough
                now = self.world.prometheus.ask(re.sub(r"\[\d+m\]", f"[{SCRAPED_S}s]", expression))
                fired = len(now) > len(before)
            else:
                now = self.world.prometheus.ask(expression)
                fired = len(now) > len(before) or sum(now) >= sum(before) + 0.5
            if fired:
                return
            time.sleep(0.3)
        pytest.fail(f"{self.page.name}: {expression} does not fire: {before} before, {now} now")

    def _alerts(self) -> None:
        """Waits until an alert of the page fires, if it has one."""
        names = _alerts_of(self.page.name)
        firing = f'ALERTS{{alertstate="firing", alertname=~"{"|".join(names)}"}}'
        deadline = time.monotonic() + SHOWS_S
        while names and not self.world.prometheus.ask(firing):
            assert time.monotonic() < deadline, f"{self.page.name}: none of {names} fires"
            time.sleep(0.3)

    def _in(self, command: Command) -> Command:
        """The same with the variables in the shown lines replaced."""
        return Command(command.text, tuple(self._expand(line) for line in command.lines))

    def _expand(self, line: str) -> str:
        for name in sorted(self.variables, key=len, reverse=True):
            line = line.replace(f"${name}", self.variables[name])
        return line

    def _execute(self, text: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"))
        environment = {**os.environ, **self.variables, "PATH": path}
        whole = ["bash", "-uo", "pipefail", "-c", text]
        return subprocess.run(whole, capture_output=True, text=True, timeout=COMMAND_S, check=False, env=environment)


@contextmanager
def _world(program: str, folder: Path, **settings: Any) -> Iterator[World]:
    (port,) = free_ports(1)
    line = Line(f"127.0.0.1:{port}")
    # The laboratory's sabotage of ranks sleeps until a signal comes.
    with _environment(PYTHONPATH=str(INJECTION_DIR)), closing(line):
        flags = ("--orchestrator", line.address, *settings.pop("worker_flags", ()))
        spec = ClusterSpec(MODEL_DIR, orchestrator_port=port, worker_flags=flags, **settings)
        with LocalCluster(spec) as cluster, closing(Prometheus(program, folder, cluster)) as prometheus:
            prometheus.wait(len(cluster.services))
            yield World(cluster, prometheus, folder, line)


@pytest.fixture(scope="module")
def world(part: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two nodes of two ranks, two routers. Each page leaves it as it found it."""
    with _world(part("prometheus"), tmp_path_factory.mktemp("runbooks"), num_nodes=2, tp=2, num_routers=2) as made:
        yield made


@pytest.fixture(scope="module")
def make_world(part: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A context manager of another cluster, for pages that need other settings."""
    return lambda **settings: _world(part("prometheus"), tmp_path_factory.mktemp("runbooks"), **settings)


@pytest.fixture
def behind_a_line(world: World) -> Iterator[Line]:
    """node-1 is reached through a line; afterwards it is direct again."""
    line = Line(world.cluster.services["node-1"].grpc_address)
    with closing(line):
        with _environment(RYZANSTEIN_ADVERTISE_ADDRESS=line.address):
            world.cluster.restart("node-1")
        world.cluster.wait_nodes(2)
        yield line
        line.tell("pass")
        world.cluster.restart("node-1")
        world.cluster.wait_nodes(2)


@pytest.fixture
def environment() -> Any:
    """What is started meanwhile inherits these variables."""
    return _environment


@pytest.fixture
def walk() -> Callable[..., Walk]:
    """Reads a page by its name."""
    return lambda world, name, variables: Walk(world, Page.read(FOLDER / f"{name}.md"), variables)


@pytest.fixture(scope="session")
def pages() -> dict[str, Page]:
    """All pages by name."""
    return {path.stem: Page.read(path) for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"}


@pytest.fixture
def all_ready(world: World) -> Iterator[None]:
    """Both nodes are ready before and after the page, whatever became of it."""
    world.cluster.wait_nodes(2)
    yield
    world.to_orchestrator.tell("pass")
    for name, service in world.cluster.services.items():
        service.signal(signal.SIGCONT)
        if not service.running:
            world.cluster.restart(name)
    try:
        world.cluster.wait_nodes(2, 15)
    except ServiceFailedError:  # drained, or with ranks that are beyond repair
        for node_id in world.cluster.node_ids:
            world.cluster.restart(node_id)
        world.cluster.wait_nodes(2)
