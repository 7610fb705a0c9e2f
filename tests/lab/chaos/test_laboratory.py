"""Every fault once, for real: no token is lost or repeated, no answer changes, no request fails.

How long things take is the benchmark's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.lab.chaos.catalog import CATALOG, by_layout
from ryzanstein.lab.chaos.machines.network import HostNetwork

pytestmark = pytest.mark.cluster

# Its clocks run 40 times as fast, so that a pause of a busy machine is a second there: it is for `make chaos`, where nothing
# else runs.
ALONE_ON_THE_MACHINE = "idle"
# Its prompt alone takes a minute, four times.
FOR_MAKE_CHAOS = "context_30k_killed"
GROUPS = {
    layout.name: [fault.name for fault in faults if fault.name != FOR_MAKE_CHAOS]
    for layout, faults in by_layout(CATALOG)
    if layout.name != ALONE_ON_THE_MACHINE
}
NEEDS = ("redis-server", "cc")
# One of each kind of connection, all of which have certificates then.
SECURELY = (
    "sigkill_agent",
    "rolling_drain",
    "node_500ms_away",
    "router_sigkill",
    "orchestrator_sigkill",
    "websocket_node_killed",
)


def failover(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ryzanstein.lab.chaos", *arguments]


def entries(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["faults"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", GROUPS)
def test_no_fault_costs_a_token(group: str, network: HostNetwork, part: Callable[[str], str], tmp_path: Path) -> None:
    for name in NEEDS:
        part(name)
    result, page = tmp_path / "failover.json", tmp_path / "budget.md"
    only = ",".join(GROUPS[group])
    command = failover("--runs", "1", "--only", only, "--json", str(result), "--report", str(page), "--seed", "test")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=390)
    message = done.stderr[-4000:]
    assert done.returncode in (0, 1), message
    assert result.exists(), message
    seen = entries(result)
    assert [entry["fault"] for entry in seen] == GROUPS[group], message
    for entry in seen:
        counts = {key: entry[key] for key in ("tokens_lost", "tokens_repeated", "answers_changed")}
        assert counts == dict.fromkeys(counts, 0), message
        assert entry["requests_failed"] == 0, message
        assert entry["unwanted"] == {}, message
        assert entry["requests"] > 0
        assert entry["answers_invalid"] == 0, message
        assert entry["answers_with_a_form"] > 0 or group != "forms", message
        assert f"| `{entry['fault']}` |" in page.read_text()


@pytest.mark.timeout(400)
def test_with_tls_and_keys_no_fault_costs_a_token_or_shows_a_secret(
    network: HostNetwork, part: Callable[[str], str], tmp_path: Path
) -> None:
    for name in NEEDS:
        part(name)
    result = tmp_path / "failover.json"
    command = failover("--secure", "--runs", "1", "--only", ",".join(SECURELY), "--json", str(result), "--seed", "test")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=390)
    assert "EXPOSED" not in done.stderr, done.stderr[-4000:]
    seen = entries(result)
    assert [entry["fault"] for entry in seen] == list(SECURELY), done.stderr[-4000:]
    for entry in seen:
        bad = ("tokens_lost", "tokens_repeated", "answers_changed", "requests_failed", "answers_invalid")
        assert {key: entry[key] for key in bad} == dict.fromkeys(bad, 0), done.stderr[-4000:]


def test_interrupted_it_leaves_nothing(network: HostNetwork, part: Callable[[str], str], tmp_path: Path) -> None:
    command = failover("--runs", "9", "--only", "sigkill_agent", "--json", str(tmp_path / "x.json"))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        any(line.startswith("sigkill_agent 1") for line in process.stderr)
        children = _children(process.pid)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 130
    assert len(children) >= 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    time.sleep(0.2)
    namespaces = subprocess.run((part("ip"), "netns", "list"), capture_output=True, text=True, check=True).stdout
    assert f"ryz{process.pid}-" not in namespaces
    links = subprocess.run((part("ip"), "link"), capture_output=True, text=True, check=True).stdout
    assert f"ryz{process.pid}" not in links


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_without_the_right_to_make_namespaces_that_is_said_loudly(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    code = "import ryzanstein.lab.chaos.machines.network as n, sys; n._PATH = ''; sys.argv[1:] = " + repr(
        ["--runs", "1", "--only", "tcp_reset", "--json", str(tmp_path / "x.json")]
    )
    command = [sys.executable, "-c", f"{code}; from ryzanstein.lab.chaos.__main__ import main; sys.exit(main())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3, done.stderr
    assert "NO NETWORK NAMESPACES" in done.stderr
    assert "NOT RUN tcp_reset" in done.stderr


def test_wrong_arguments_are_named() -> None:
    done = subprocess.run(failover("--only", "sigkil"), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no such fault: sigkil" in done.stderr.replace("\n", " ")


def test_an_interrupted_campaign_continues_where_it_was(
    network: HostNetwork, part: Callable[[str], str], tmp_path: Path
) -> None:
    result, progress = tmp_path / "x.json", tmp_path / "x.jsonl"
    command = failover(
        "--runs", "3", "--only", "client_gone_and_back,tcp_reset", "--json", str(result), "--progress", str(progress)
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        any(line.startswith("client_gone_and_back 2") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 130
    assert not result.exists()
    kept = len(progress.read_text().splitlines()) - 1
    assert kept >= 3
    done = subprocess.run([*command, "--minutes", "1"], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode in (0, 1), done.stderr
    assert f"continuing after {kept} runs" in done.stderr
    assert "client_gone_and_back 2:" not in done.stderr
    assert [entry["runs"] for entry in entries(result)] == [3, 3]
    assert not progress.exists()
