"""A service as a child process: here the orchestrator, which needs no other."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceFailedError, ServiceProcess, serves
from ryzanstein.cli.status.scrape import total

READY_S = 30.0


def describe(directory: Path, *extra: str) -> ServiceProcess:
    grpc_port, metrics_port = free_ports(2)
    flags = {"grpc_port": grpc_port, "metrics_port": metrics_port, "database": str(directory / "orchestrator.sqlite")}
    return ServiceProcess("orchestrator", "orchestrator", flags, extra, directory / "orchestrator.log")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    described = describe(tmp_path)
    yield described
    described.kill()


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    """Whether the process ends, or is a zombie only, within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_it_becomes_ready_serves_metrics_and_ends_on_sigterm(service: ServiceProcess) -> None:
    service.start()
    service.wait_ready(time.monotonic() + READY_S)
    assert service.running
    assert serves(service.grpc_address, "")
    assert total(service.metrics_url, "ryzanstein_orchestrator_nodes") == 0
    service.signal(signal.SIGTERM)
    assert service.wait_ended(READY_S)
    assert not serves(service.grpc_address)


def test_it_can_be_killed_and_started_again_on_the_same_ports(service: ServiceProcess) -> None:
    service.start()
    service.wait_ready(time.monotonic() + READY_S)
    first = service.pid
    service.kill()
    assert gone(first)
    service.start()
    service.wait_ready(time.monotonic() + READY_S)
    assert service.pid != first


def test_a_service_that_ends_is_reported_with_what_it_said_last(tmp_path: Path) -> None:
    service = describe(tmp_path, "--lease-s", "-1")
    service.start()
    with pytest.raises(ServiceFailedError, match=r"orchestrator ended with exit code 2\n.*lease"):
        service.wait_ready(time.monotonic() + READY_S)
    service.kill()


def test_a_service_that_never_gets_ready_is_reported_when_the_time_is_up(service: ServiceProcess) -> None:
    service.start()
    service.signal(signal.SIGSTOP)
    with pytest.raises(ServiceFailedError, match="orchestrator did not become ready in time"):
        service.wait_ready(time.monotonic() + 0.5)


def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    database, log = str(tmp_path / "o.sqlite"), str(tmp_path / "o.log")
    program = (
        "import sys, time, pathlib; from ryzanstein.cli.processes.service_process import ServiceProcess\n"
        f"flags = {{'grpc_port': 0, 'metrics_port': 0, 'database': {database!r}}}\n"
        f"service = ServiceProcess('orchestrator', 'orchestrator', flags, (), pathlib.Path({log!r}))\n"
        "service.start(); print(service.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        # Until it is the service itself that runs, it is our own tether that could end.
        while "ryzanstein.orchestrator" not in " ".join(psutil.Process(pid).cmdline()[:4]):
            time.sleep(0.02)
        parent.kill()
        parent.wait()
        assert gone(pid)


def test_ports_are_free_and_different() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    with socket.socket() as first:
        first.bind(("127.0.0.1", ports[0]))


def test_its_log_is_continued_in_new_files(tmp_path: Path) -> None:
    service = describe(tmp_path, "--log-file-bytes", "100", "--log-files", "2")
    service.start()
    service.wait_ready(time.monotonic() + READY_S)
    service.signal(signal.SIGTERM)
    assert service.wait_ended(READY_S)
    service.kill()
    assert {path.name for path in tmp_path.glob("*.log*")} <= {"orchestrator.log", "orchestrator.log.1", "orchestrator.log.2"}
    assert (tmp_path / "orchestrator.log.1").exists()
    assert "stopped" in service.log_tail(1)
