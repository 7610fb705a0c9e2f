"""A service that keeps ending is started again for ever, later and later, and the others never notice."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from ryzanstein.backoff import Backoff
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceProcess
from ryzanstein.cli.up.kept_service import KeptService
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc

pytestmark = pytest.mark.cluster

KILLS = 7


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not become so"
        time.sleep(0.02)
    return found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """An orchestrator."""
    grpc_port, metrics_port = free_ports(2)
    flags = {"grpc_port": grpc_port, "metrics_port": metrics_port, "database": str(tmp_path / "o.sqlite")}
    service = ServiceProcess("orchestrator", "orchestrator", flags, (), tmp_path / "o.log")
    yield service
    service.kill()


@pytest.mark.long
def test_a_service_that_ends_is_started_again_after_longer_and_longer_pauses(service: ServiceProcess) -> None:
    kept = KeptService(service, Backoff(1.0, 8.0, 60.0))
    service.start()
    now, pauses = 1000.0, []
    for _ in range(KILLS):
        assert list(kept.look(now)) == []
        service.signal(signal.SIGKILL)
        assert service.wait_ended(10)
        (line,) = kept.look(now)
        assert line.startswith("orchestrator was killed by signal 9 (Killed); restarting in ")
        for waited in range(1, 100):
            assert list(kept.look(now + waited / 10)) == [], "said once"
            if service.running:
                pauses.append(waited / 10)
                break
        now += 10
    for pause_s, longest_s in zip(pauses, (1.0, 2.0, 4.0, *[8.0] * (KILLS - 3)), strict=True):
        assert longest_s / 2 <= pause_s <= longest_s + 0.1
    assert list(kept.look(now + 100)) == []
    service.signal(signal.SIGKILL)
    assert service.wait_ended(10)
    (line,) = kept.look(now + 100)
    assert "in a row" not in line, "after a minute of health the count is forgotten"


@pytest.mark.long
def test_a_service_that_ends_by_itself_is_never_given_up(tmp_path: Path) -> None:
    ports = dict(zip(("grpc_port", "metrics_port"), free_ports(2), strict=True))
    service = ServiceProcess("odd", "orchestrator", ports, ("--no-such-setting",), tmp_path / "odd.log")
    kept, now, lines = KeptService(service, Backoff(1.0, 1.0, 60.0)), 0.0, []
    service.start()
    while len(lines) < 8:
        assert service.wait_ended(60)
        lines += kept.look(now)
        now += 1.0
        lines += kept.look(now)
    service.kill()
    assert lines[0].startswith("odd ended with exit code 2; restarting in ")
    assert lines[7].endswith(f"(8 times in a row, see {tmp_path / 'odd.log'})")


@pytest.mark.long
def test_what_cannot_even_be_started_is_tried_again(service: ServiceProcess, tmp_path: Path) -> None:
    kept = KeptService(service, Backoff(1.0, 1.0, 60.0))
    service.start()
    service.kill()
    service.log_path.unlink()
    service.log_path.mkdir()
    assert len(list(kept.look(0.0))) == 1
    (line,) = kept.look(1.0)
    assert line.startswith("orchestrator failed to start: ")
    service.log_path.rmdir()
    assert list(kept.look(2.0)) == []
    assert service.running


class Answers(threading.Thread):
    """Asks the router for one long answer after the other until it is told to stop; remembers what was not whole."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._stopped = threading.Event()
        self.whole = 0
        self.tokens = 0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._ask()
            except (grpc.RpcError, AssertionError) as failure:
                self.failures.append(repr(failure))
                return

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)

    def _ask(self) -> None:
        messages = [inference.Message(role=inference.ROLE_USER, content="Hello!")]
        sampling = inference.SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
        request = inference.StreamChatRequest(chat=inference.ChatRequest(messages=messages, sampling=sampling))
        with grpc.insecure_channel(self._address) as channel:
            seen = 0
            for response in inference_pb2_grpc.InferenceServiceStub(channel).StreamChat(request, timeout=60):
                delta = response.event.delta
                assert not delta.token_ids or delta.first_index == seen
                seen += len(delta.token_ids)
                self.tokens += len(delta.token_ids)
        assert seen == 400
        self.whole += 1


@pytest.mark.lab
@pytest.mark.timeout(400)
def test_one_service_killed_seven_times_takes_no_other_along(tmp_path: Path) -> None:
    ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
    program = str(Path(sys.executable).with_name("ryzanstein"))
    command = [program, "up", "--json", "--nodes", "1", "--tp", "1", "--state-dir", str(tmp_path / "state"), *ports]
    log = tmp_path / "up.log"
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as up:
        assert up.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(up.stdout.readline())
            assert lines[-1], log.read_text()
        addresses = json.loads("".join(lines))
        threading.Thread(target=up.stdout.read, daemon=True).start()
        others = {name: psutil.Process(pid) for name, pid in addresses["pids"].items() if name != "orchestrator"}

        def orchestrator() -> psutil.Process | None:
            for child in psutil.Process(up.pid).children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if "ryzanstein.orchestrator" in child.cmdline():
                        return child
            return None

        answers = Answers(addresses["grpc"][0])
        answers.start()
        try:
            killed: set[int] = set()
            for _ in range(KILLS):
                victim = until(lambda: (found := orchestrator()) is not None and found.pid not in killed and found)
                killed.add(victim.pid)
                victim.kill()
            until(lambda: (found := orchestrator()) is not None and found.pid not in killed)
            tokens = answers.tokens
            until(lambda: answers.tokens > tokens or answers.failures)
        finally:
            answers.stop()
            running = up.poll() is None and all(process.is_running() for process in others.values())
            up.terminate()
            try:
                code = up.wait(60)
            finally:
                up.kill()
    assert running, log.read_text()
    assert answers.failures == []
    assert answers.whole > 0
    assert code == 0
