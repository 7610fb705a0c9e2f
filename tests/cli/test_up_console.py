"""`ryzanstein up` runs the console beside its cluster: a process that comes and goes with it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from tests.cli.test_commands import COMMAND_S, command, left_of

from ryzanstein.cli.processes.ports import free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(180)]

LINK = re.compile(r"http://127\.0\.0\.1:\d+/#t=\S+")
FREE = ("--http-port=0", "--grpc-port=0", "--orchestrator-port=0", "--nodes=1", "--tp=1")


class Told:
    """`ryzanstein up`, and what it told until now."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "told"
        with self.log.open("w") as log:
            whole = command("up", "--state-dir", str(folder / "state"), *FREE, *arguments)
            self.process = subprocess.Popen(whole, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=folder)

    def until(self, wanted: Callable[[str], bool]) -> str:
        """Waits, bounded, until it has told something. Returns all of it."""
        deadline = time.monotonic() + COMMAND_S
        while not wanted(told := self.log.read_text()):
            assert time.monotonic() < deadline, told
            assert self.process.poll() is None, told
            time.sleep(0.05)
        return told

    def consoles(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in family if "ryzanstein.console" in each.cmdline()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Told]]:
    started: list[Told] = []

    def one(*arguments: str) -> Told:
        started.append(Told(tmp_path, *arguments))
        return started[-1]

    yield one
    for each in started:
        each.process.kill()
        each.process.wait()


def login(link: str) -> int:
    """The status of a login with a link."""
    url, _, token = link.partition("#t=")
    place = urlsplit(url).netloc
    connection = http.client.HTTPConnection(place, timeout=20)
    connection.request("POST", "/login", json.dumps({"token": token}), {"Origin": f"http://{place}"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_it_prints_the_link_last_keeps_the_console_running_and_takes_it_along(start: Callable[..., Told]) -> None:
    up = start("--console-port", "0")
    told = up.until(lambda told: LINK.search(told) is not None)
    link = LINK.findall(told)[-1]
    assert told.rstrip().endswith(link)
    assert login(link) == 204
    (console,) = up.consoles()
    listening = {each.laddr.ip for each in console.net_connections() if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    console.send_signal(signal.SIGUSR1)
    another = up.until(lambda told: len(LINK.findall(told)) == 2)
    assert login(LINK.findall(another)[-1]) == 204
    console.kill()
    again = LINK.findall(up.until(lambda told: len(LINK.findall(told)) == 3))[-1]
    assert login(again) == 204
    logs = "".join(each.read_text() for each in (up.log.parent / "state").glob("console.log*"))
    assert "#t=" not in logs
    family = psutil.Process(up.process.pid).children(recursive=True)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(COMMAND_S) == 0, up.log.read_text()
    assert left_of(family) == []
    assert up.log.read_text().rstrip().endswith("stopped; no process is left")


def test_a_port_that_is_taken_costs_the_page_and_not_the_cluster(start: Callable[..., Told]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start("--console-port", str(port))
        told = up.until(lambda told: "no console" in told)
    (sentence,) = [line for line in told.splitlines() if "no console" in line]
    assert sentence.startswith(f"no console: port {port} of 127.0.0.1 is taken by process {os.getpid()} (")
    assert sentence.endswith("; choose another with --console-port, or 0")
    time.sleep(2)
    assert up.process.poll() is None
    assert up.consoles() == []


def test_without_a_console_there_is_none(start: Callable[..., Told]) -> None:
    up = start("--no-console")
    up.until(lambda told: "Ctrl-C stops everything." in told)
    time.sleep(2)
    assert up.consoles() == []
    assert "no console" not in up.log.read_text()


def test_a_script_asks_for_the_console_and_gets_its_link(start: Callable[..., Told]) -> None:
    (port,) = free_ports(1)
    up = start("--json", "--console", "--console-port", str(port))
    told = up.until(lambda told: told.endswith("}\n"))
    document = json.loads(told[told.index("{\n") :])
    assert document["console"].startswith(f"http://127.0.0.1:{port}/#t=")
    assert login(document["console"]) == 204
    up.process.kill()
    up.process.wait()
    time.sleep(0.5)
    with pytest.raises(OSError, match="refused"):
        login(document["console"])
