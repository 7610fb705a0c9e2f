"""Hosts are apart from each other and from this machine, connections can be cut and reset, and nothing stays."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from ryzanstein.cli.processes.host import Host
from ryzanstein.lab.chaos.machines.child import Child, wait_listening
from ryzanstein.lab.chaos.machines.network import HostNetwork, NetworkImpossibleError, program

PORT = 7000
_ECHO = """
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(4096):
            self.request.sendall(data)
socketserver.ThreadingTCPServer(("{address}", {port}), Echo).serve_forever()
"""


@pytest.fixture
def echo(network: HostNetwork) -> Iterator[Host]:
    """A host that answers with what it hears."""
    host = network.add("echo")
    child = Child((sys.executable, "-I", "-c", _ECHO.format(address=host.address, port=PORT)), host)
    child.start()
    wait_listening(host.address, PORT)
    yield host
    child.kill()


def reaches(connection: socket.socket, data: bytes = b"ping") -> bool:
    """Whether it answers within a moment."""
    connection.settimeout(0.3)
    try:
        connection.sendall(data)
        return connection.recv(4096) == data
    except TimeoutError:
        return False


def address_of_ours(echo: Host) -> str:
    return f"{echo.address.rpartition('.')[0]}.1"


def test_a_host_is_reached_from_here_and_from_another_host(network: HostNetwork, echo: Host) -> None:
    with socket.create_connection((echo.address, PORT), timeout=2) as connection:
        assert reaches(connection)
    other = network.add("other", GREETING="hello")
    ask = f"import os, socket; socket.create_connection(('{echo.address}', {PORT}), 2); print(os.environ['GREETING'])"
    done = subprocess.run((*other.prefix, sys.executable, "-c", ask), capture_output=True, text=True, check=False, timeout=10)
    assert done.stdout == "hello\n", done.stderr


async def test_dropped_packets_are_silence_that_ends_with_the_rule(network: HostNetwork, echo: Host) -> None:
    ours = address_of_ours(echo)
    with socket.create_connection((echo.address, PORT), timeout=2) as connection:
        assert reaches(connection)
        for rules in ((f"ip saddr {ours} drop",), ()), ((), (f"ip daddr {ours} drop",)):
            async with network.rules("echo", *rules):
                assert not reaches(connection, b"lost?")
            connection.settimeout(5)
            assert connection.recv(4096) == b"lost?"  # TCP sends it again


async def test_a_reset_breaks_the_connection_at_once(network: HostNetwork, echo: Host) -> None:
    with socket.create_connection((echo.address, PORT), timeout=2) as connection:
        assert reaches(connection)
        rule = f"ip saddr {address_of_ours(echo)} tcp dport {PORT} reject with tcp reset"
        async with network.rules("echo", inbound=(rule,)):
            with pytest.raises(ConnectionError):
                assert not reaches(connection)
    with socket.create_connection((echo.address, PORT), timeout=2) as connection:
        assert reaches(connection)


async def test_a_rule_that_nft_refuses_is_an_error_and_leaves_no_table(network: HostNetwork, echo: Host) -> None:
    with pytest.raises(OSError, match="nft refused"):
        async with network.rules("echo", inbound=("ip saddr nonsense drop",)):
            pytest.fail("entered")
    async with network.rules("echo", inbound=("ip saddr 192.0.2.1 drop",)):
        await asyncio.sleep(0)


def test_nothing_is_left(part: Callable[[str], str], network: HostNetwork) -> None:
    network.add("one")
    name = network.namespace("one")
    listed = (part("ip"), "netns", "list")
    assert name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    network.remove("one")
    assert name not in subprocess.run(listed, capture_output=True, text=True, check=True).stdout


def test_what_a_killed_laboratory_left_is_removed_by_the_next(part: Callable[[str], str], network: HostNetwork) -> None:
    ended = subprocess.run(("sh", "-c", "echo $$"), capture_output=True, text=True, check=True).stdout.strip()
    left = f"ryz{ended}-node-0"
    subprocess.run((part("ip"), "netns", "add", left), check=True)
    with pytest.raises(NetworkImpossibleError), HostNetwork():
        pytest.fail("our own names are taken by the open network")
    assert left not in subprocess.run((part("ip"), "netns", "list"), capture_output=True, text=True, check=True).stdout


def test_a_missing_program_is_named() -> None:
    with pytest.raises(NetworkImpossibleError, match="no-such-program is not installed"):
        program("no-such-program")
