"""Hosts and ports as text, IPv6 included: joined and split in one place, and every listener takes every spelling."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from pathlib import Path

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from ryzanstein.addresses import join_address, split_address
from ryzanstein.cli.processes.service_process import serves
from ryzanstein.config import ServiceSettings
from ryzanstein.observe.metrics import MetricsServer, new_registry
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.faces.http.serving.server import HttpServer
from ryzanstein.rpc.server import RpcServer
from ryzanstein.worker.agent.membership.reachable_address import ReachableAddress

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("host", "joined"), [("a", "a:1"), ("10.0.0.1", "10.0.0.1:1"), ("::1", "[::1]:1"), ("[::1]", "[::1]:1")]
)
def test_a_host_of_ipv6_has_brackets_once(host: str, joined: str) -> None:
    assert join_address(host, 1) == joined
    assert split_address(joined) == (host.strip("[]"), 1)


@pytest.mark.parametrize(
    ("address", "why"),
    [("::1:50051", "brackets"), ("a", "host:port"), ("a:0", "host:port"), ("[]:1", "host:port"), ("a:70000", "host:port")],
)
def test_what_is_no_address_is_refused_with_the_reason(address: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split_address(address)


def test_hosts_and_ports_are_joined_and_split_here_alone() -> None:
    """The simulation's hosts are names without an address."""
    parts = re.compile(r"""[hH]ost\w*\}:\{|address\}:\{|r?partition\(":"\)\[0\]|host, _, port""")
    modules = [
        path
        for folder in ("services", "shared", "lab", "clients/python")
        for path in (ROOT / folder).rglob("*.py")
        if "simulation" not in path.parts
    ]
    found = {str(path.relative_to(ROOT)) for path in modules if parts.search(path.read_text())}
    assert found == {"clients/python/ryzanstein/addresses.py"}


@pytest.mark.parametrize("host", ["::", "[::]", "::1", "[::1]"])
async def test_every_listener_takes_every_spelling_of_ipv6(host: str) -> None:
    host = ServiceSettings(host=host).host
    grpc, http, metrics = RpcServer(host, 0, []), HttpServer(FastAPI(), host, 0), MetricsServer(new_registry(), host, 0)
    try:
        await grpc.start()
        await grpc.set_ready(True)
        await http.start()
        for reached in ("::1", "127.0.0.1") if host == "::" else ("::1",):
            assert await asyncio.to_thread(serves, join_address(reached, grpc.port), timeout_s=5)
            for port in (http.port, metrics.port):
                socket.create_connection((reached, port), timeout=5).close()
    finally:
        metrics.close()
        await http.stop(0)
        await grpc.stop(0)


async def test_a_name_server_that_is_away_holds_up_no_loop_and_nothing_that_has_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def away(name: str = "") -> str:
        asked.append(name)
        time.sleep(0.3)
        return "node-0"

    monkeypatch.setattr(socket, "getfqdn", away)
    late = asyncio.create_task(_lateness())
    address = ReachableAddress("", "::", 7)
    await address.look_up()
    assert address.known == "node-0:7"
    assert await late < 0.2
    known = [ReachableAddress("a:1", "0.0.0.0", 7), ReachableAddress("", "::1", 7)]
    await asyncio.gather(*(each.look_up() for each in known))
    assert [each.known for each in known] == ["a:1", "[::1]:7"]
    MetricsServer(new_registry(), "127.0.0.1", 0).close()
    assert asked == [""]


async def _lateness() -> float:
    began = time.monotonic()
    for _ in range(10):
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("given", "known"), [("10.0.0.7", "10.0.0.7:9"), ("fd00::7", "[fd00::7]:9"), ("[fd00::7]:1", "[fd00::7]:1"), ("a:1", "a:1")]
)
def test_an_advertised_ip_address_alone_gets_the_port(given: str, known: str) -> None:
    assert ReachableAddress(given, "0.0.0.0", 9).known == known


def test_an_address_of_another_service_without_brackets_is_refused_at_the_start() -> None:
    with pytest.raises(ValidationError, match="must have brackets"):
        RouterSettings(orchestrator="::1:50050")
    with pytest.raises(ValidationError, match="must have brackets"):
        RouterSettings(nodes="10.0.0.1:50061,fd00::1:50061")
    assert RouterSettings(nodes="[::1]:1, unix:/a,dns:///b:2").nodes == "[::1]:1,unix:/a,dns:///b:2"
