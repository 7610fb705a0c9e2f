"""A service that strangers could use does not start, and says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings

KINDS = (RouterSettings, WorkerSettings, OrchestratorSettings)


def started(service: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RYZANSTEIN_")}
    command = [sys.executable, "-P", "-m", f"ryzanstein.{service}", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("service", ["router", "worker", "orchestrator"])
def test_it_ends_with_2_and_names_the_ways_out(service: str) -> None:
    ended = started(service, "--host", "0.0.0.0")
    assert ended.returncode == 2
    for way in ("--insecure", "--host", "127.0.0.1", *(("--keys-file",) if service == "router" else ())):
        assert way in ended.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "127.9.9.9"])
def test_a_loopback_address_needs_nothing(kind: type, host: str) -> None:
    kind(host=host).check_exposure()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-1", "localhost.example"])
def test_any_other_needs_protection(kind: type, host: str) -> None:
    with pytest.raises(ValueError, match="insecure"):
        kind(host=host).check_exposure()
    kind(host=host, insecure=True).check_exposure()


def test_keys_protect_a_router_unless_they_are_optional(tmp_path: Path) -> None:
    keys_file, key = tmp_path / "keys.toml", ApiKey.new()
    keys_file.touch(0o600)
    keys_file.write_text(key_text(KeyRecord(key.key_id, key.digest(), "acme", frozenset())))
    RouterSettings(host="0.0.0.0", keys_file=keys_file).check_exposure()
    with pytest.raises(ValueError, match="insecure"):
        RouterSettings(host="0.0.0.0", keys_file=keys_file, auth="optional").check_exposure()


def test_keys_do_not_protect_the_port_for_routers_on_other_hosts(tmp_path: Path) -> None:
    keyed = {"host": "0.0.0.0", "auth": "required", "keys_file": tmp_path / "keys.toml"}
    reached: tuple[dict[str, Any], ...] = (
        {"session_store": "redis", "redis_url": "redis://r"},
        {"router_address": "10.0.0.1:50052"},
    )
    for more in reached:
        for tls in ("off", "accept"):
            with pytest.raises(ValueError, match="port for other routers"):
                RouterSettings(**keyed, **more, tls=tls, tls_dir=tmp_path).check_exposure()
        RouterSettings(**keyed, **more, tls="require", tls_dir=tmp_path).check_exposure()
    RouterSettings(**keyed, session_store="memory").check_exposure()


@pytest.mark.parametrize("kind", KINDS)
def test_the_port_for_probes_neither_protects_nor_exposes(kind: type, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="insecure"):
        kind(host="0.0.0.0", health_port=9091).check_exposure()
    kind(host="127.0.0.1", health_port=9091).check_exposure()
    if kind is not RouterSettings:  # which has keys for that
        kind(host="0.0.0.0", health_port=9091, tls="require", tls_dir=tmp_path).check_exposure()
