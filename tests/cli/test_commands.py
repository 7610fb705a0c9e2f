"""The commands as a person runs them, each a process, on clusters that `ryzanstein up` started."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import serves

pytestmark = pytest.mark.cluster

COMMAND_S = 60.0


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("ryzanstein")), *arguments]


def run(*arguments: str, says: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), input=says, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def document(*arguments: str) -> Any:
    """What a command with `--json` prints."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Up:
    """A running `ryzanstein up` and the addresses that it printed."""

    process: subprocess.Popen[str]
    addresses: dict[str, Any]
    log: Path

    @property
    def router(self) -> tuple[str, str]:
        return ("--router", self.addresses["grpc"][0])

    @property
    def orchestrator(self) -> tuple[str, str]:
        return ("--orchestrator", self.addresses["orchestrator"])

    def family(self) -> list[psutil.Process]:
        """Everything that runs for it: services, ranks and their helpers."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self) -> int:
        return self.process.wait(COMMAND_S)


def left_of(family: list[psutil.Process]) -> list[psutil.Process]:
    """Who still runs, a moment later: ranks end when the kernel tells them that their agent did."""
    _, alive = psutil.wait_procs(family, timeout=10)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


Starter = Callable[..., Up]


def _starter(directory: Path, started: list[subprocess.Popen[str]]) -> Starter:
    def start(*arguments: str) -> Up:
        ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
        log = directory / f"up-{len(started)}.log"
        with log.open("w") as errors:
            whole = command("up", "--json", "--state-dir", str(directory / "state"), *ports, *arguments)
            process = subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=errors, text=True)
        started.append(process)
        return Up(process, _first_document(process, log), log)

    return start


def _first_document(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """What `--json` prints when everything is ready. A process that ends closes its output, so this ends too."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            return dict(json.loads("".join(lines)))
    pytest.fail(f"`ryzanstein up` ended: {log.read_text()}")


def _end(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts `ryzanstein up` on free ports; what is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []
    yield _starter(tmp_path, started)
    _end(started)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two nodes of one rank, for tests that only talk to them. The last test drains one."""
    started: list[subprocess.Popen[str]] = []
    yield _starter(tmp_path_factory.mktemp("up"), started)("--nodes", "2", "--tp", "1")
    _end(started)


def test_chat_streams_an_answer_and_tells_who_gave_it_and_how_fast(up: Up) -> None:
    done = run("chat", "Count from 1 to 60.", *up.router)
    assert (done.returncode, done.stdout) == (0, " ".join(map(str, range(1, 61))) + "\n")
    assert "node-" in done.stderr
    assert "first token" in done.stderr
    assert "tokens/s" in done.stderr


def test_chat_as_json_has_everything(up: Up) -> None:
    answer = document("chat", "Count from 1 to 5.", *up.router)
    assert answer["text"] == "1 2 3 4 5"
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] >= len(answer["token_ids"]) > 0
    assert answer["time_to_first_token_s"] > 0
    assert answer["node_ids"][0] in up.addresses["nodes"]


def test_a_session_goes_on_over_commands(up: Up) -> None:
    first = document("chat", "My name is Zorvia.", "--session", "by-hand", *up.router)
    second = document("chat", "What is my name?", "--session", "by-hand", *up.router)
    assert "Zorvia" in second["text"]
    assert first["node_ids"] == second["node_ids"]


def test_an_interactive_conversation_ends_with_the_input_and_survives_errors(up: Up) -> None:
    done = run("chat", *up.router, says="My name is Zorvia.\n\nWhat is my name?\n")
    assert done.returncode == 0
    assert "Zorvia" in done.stdout.splitlines()[1]


def test_what_the_cluster_refuses_is_exit_code_1_and_a_sentence_about_the_field(up: Up) -> None:
    done = run("chat", "Hello!", "--session", "s" * 129, *up.router)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: session_id ")
    assert done.stderr.splitlines()[-1].endswith(" (INVALID_ARGUMENT)")


def test_status_lists_nodes_ranks_models_and_sessions(up: Up) -> None:
    document("chat", "Hello!", "--session", "seen", *up.router)
    status = document("status", *up.router, *up.orchestrator)
    assert {each["node"]["node_id"]: each["node"]["state"] for each in status["nodes"]} == {
        "node-0": "READY",
        "node-1": "READY",
    }
    for each in status["nodes"]:
        (rank,) = each["ranks"]
        assert psutil.pid_exists(rank["pid"])
        assert each["node"]["load"]["kv_blocks_total"] > 0
    assert [(model["name"], model["ready_nodes"]) for model in status["models"]] == [("demo", 2)]
    assert "seen" in {session["session_id"] for session in status["sessions"]}


def test_status_for_people_is_plain_text_in_a_pipe(up: Up) -> None:
    done = run("status", *up.router, *up.orchestrator)
    assert done.returncode == 0
    assert "node-0" in done.stdout
    assert "READY" in done.stdout
    assert "\x1b" not in done.stdout


def test_status_of_a_router_alone_shows_what_its_nodes_say_themselves(up: Up) -> None:
    nobody = ("--orchestrator", f"127.0.0.1:{free_ports(1)[0]}")
    done = run("status", "--json", *up.router, *nobody)
    assert done.returncode == 1
    assert "orchestrator did not answer" in done.stderr
    for each in json.loads(done.stdout)["nodes"]:
        node = each["node"]
        assert (node["tp"], node["state"], node["model"]) == (1, "READY", "demo")
        assert node["load"]["kv_blocks_total"] > 0


def test_draining_an_unknown_node_is_exit_code_1(up: Up) -> None:
    done = run("drain", "node-9", *up.orchestrator)
    assert done.returncode == 1
    assert "NOT_FOUND" in done.stderr


def test_a_drained_node_gets_no_more_work(up: Up) -> None:
    answer = document("chat", "Hello!", "--session", "moving", *up.router)
    assert run("drain", "--direct", up.addresses["nodes"][answer["node_ids"][0]], "--grace", "5").returncode == 0
    moved = document("chat", "Hello!", "--session", "moving", *up.router)
    assert moved["node_ids"] != answer["node_ids"]


def test_ctrl_c_ends_everything_with_exit_code_0(start: Starter) -> None:
    up = start("--nodes", "1", "--tp", "2")
    family = up.family()
    assert len(family) >= 5  # an orchestrator, a router, an agent and its two ranks
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 0
    assert left_of(family) == []


@pytest.mark.long
def test_a_killed_command_leaves_nothing_running(start: Starter) -> None:
    up = start("--nodes", "1", "--tp", "2")
    family = up.family()
    up.process.kill()
    assert left_of(family) == []


@pytest.mark.long
def test_a_service_that_dies_is_started_again_on_its_ports(up: Up) -> None:
    node = up.addresses["nodes"]["node-0"]
    dead = psutil.Process(up.addresses["pids"]["node-0"])
    dead.kill()
    dead.wait(COMMAND_S)
    deadline = time.monotonic() + COMMAND_S
    while not serves(node) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert serves(node)
    assert "node-0 was killed by signal 9 (Killed); restarting" in up.log.read_text()


@pytest.mark.long
def test_the_demo_keeps_its_promises() -> None:
    demo = document("demo")
    assert [promise["name"] for promise in demo["promises"] if not promise["kept"]] == []
    failover = demo["failover"]
    assert (failover["lost"], failover["repeated"], failover["identical"]) == (0, 0, True)
    assert failover["continued_on"] != failover["killed_node"]
    assert 0 < failover["detected_to_rerouted_s"] < 1
    assert demo["duration_s"] < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_neither_processes_nor_files(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        command("demo"), env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + COMMAND_S
    while not (logs := list(tmp_path.glob("*/node-1.log"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert logs
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 130, output
    assert left_of(family) == []
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_exit_code_1_and_named_with_its_holder(tmp_path: Path) -> None:
    free = [part for port in ("--http-port", "--orchestrator-port") for part in (port, "0")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("up", "--nodes", "1", "--tp", "1", "--grpc-port", port, "--state-dir", str(tmp_path), *free)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"port {port} of 127.0.0.1 is taken by process {os.getpid()} (")
    assert sentence.endswith("); choose another with --grpc-port, or 0")


def test_a_second_up_in_the_same_directory_learns_who_has_it_and_disturbs_nobody(up: Up) -> None:
    directory = up.addresses["state_dir"]
    ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
    done = run("up", "--state-dir", directory, *ports)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"the state directory {directory} is in use by process {up.process.pid};")
    assert document("chat", "Count from 1 to 5.", *up.router)["text"] == "1 2 3 4 5"


def test_a_second_up_on_the_same_port_learns_who_has_it_and_disturbs_nobody(up: Up, tmp_path: Path) -> None:
    port = up.addresses["grpc"][0].rpartition(":")[2]
    done = run("up", "--state-dir", str(tmp_path / "other"), "--grpc-port", port, "--http-port", "0")
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"port {port} of 127.0.0.1 is taken by process {up.addresses['pids']['router-0']} (")
    assert document("chat", "Count from 1 to 5.", *up.router)["text"] == "1 2 3 4 5"


@pytest.mark.long
def test_an_up_that_was_killed_is_no_obstacle_to_the_next(start: Starter) -> None:
    first = start("--nodes", "1", "--tp", "1")
    family = first.family()
    first.process.kill()
    first.wait()
    assert left_of(family) == []
    assert start("--nodes", "1", "--tp", "1").addresses["state_dir"] == first.addresses["state_dir"]


def test_what_up_writes_is_for_its_owner_alone(up: Up) -> None:
    directory = Path(up.addresses["state_dir"])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    logs = list(directory.glob("*.log"))
    assert len(logs) == 4
    assert {stat.S_IMODE(log.stat().st_mode) for log in logs} == {0o600}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--grpc-port", "9000", "--http-port", "9001", "--routers", "2"), "port 9001 is also used by --grpc-port"),
        (("--grpc-port", "65535", "--routers", "2"), "port 65536 of router 1 is above 65535"),
    ],
)
def test_ports_that_cannot_be_are_exit_code_2(flags: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = run("up", "--state-dir", str(tmp_path), *flags)
    assert done.returncode == 2
    assert named in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.long
def test_the_last_ready_node_is_drained_only_when_asked_twice_and_then_chat_says_so_at_once(start: Starter) -> None:
    up = start("--nodes", "2", "--tp", "1")
    assert run("drain", "node-0", *up.orchestrator).returncode == 0
    refused = run("drain", "node-1", *up.orchestrator, says="")
    assert refused.returncode == 1
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith("node-1 is the last ready node of 'demo': ")
    assert "--force" in sentence
    direct = run("drain", "--direct", up.addresses["nodes"]["node-1"], *up.orchestrator, says="")
    assert (direct.returncode, direct.stderr) == (1, refused.stderr)
    assert document("chat", "Count from 1 to 5.", *up.router)["text"] == "1 2 3 4 5"
    assert at_a_terminal("drain", "node-1", *up.orchestrator, says="n") == 1
    assert document("chat", "Count from 1 to 5.", *up.router)["text"] == "1 2 3 4 5"
    assert at_a_terminal("drain", "node-1", *up.orchestrator, says="y") == 0
    asked_at = time.monotonic()
    deadline = asked_at + COMMAND_S
    while (done := run("chat", "Hello!", *up.router)).returncode == 0 and time.monotonic() < deadline:
        asked_at = time.monotonic()
    assert time.monotonic() - asked_at < 12, "it waited for a node, as for one that is away"
    assert done.returncode == 1
    assert "all its nodes are draining (node-0, node-1) (UNAVAILABLE, NO_NODES)" in done.stderr
    assert run("undrain", "node-1", *up.orchestrator).returncode == 0
    while run("chat", "Hello!", *up.router).returncode != 0 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert run("drain", "node-1", "--force", *up.orchestrator).returncode == 0


def at_a_terminal(*arguments: str, says: str) -> int:
    """The exit code of a command whose standard input is a terminal, where a person answers so."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command(*arguments), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        os.write(ours, f"{says}\n".encode())
        output, _ = process.communicate(timeout=COMMAND_S)
        assert b"is the last ready node of 'demo'" in output
        return process.returncode
    finally:
        os.close(theirs)
        os.close(ours)
