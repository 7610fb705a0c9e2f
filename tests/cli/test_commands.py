"""The commands as a person runs them, each a process, on a cluster that `ryzanstein up` started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.cluster

COMMAND_S = 60.0
START_S = 90.0


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("ryzanstein")), *arguments]


def run(*arguments: str, says: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), input=says, capture_output=True, text=True, timeout=COMMAND_S, check=False, stdin=None
    )


@dataclass(frozen=True)
class Up:
    """A running `ryzanstein up` and what it printed."""

    process: subprocess.Popen[str]
    addresses: dict[str, Any]

    @property
    def router(self) -> str:
        return str(self.addresses["grpc"][0])

    @property
    def orchestrator(self) -> str:
        return str(self.addresses["orchestrator"])

    def family(self) -> list[psutil.Process]:
        """Everything that runs for it: services, ranks and their helpers."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Up]]:
    """Starts `ryzanstein up` on free ports; ends what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def up(*arguments: str) -> Up:
        ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
        state_dir = tmp_path_factory.mktemp("state")
        log = (state_dir / "up.log").open("w")
        with log:
            process = subprocess.Popen(
                command("up", "--json", "--state-dir", str(state_dir), *ports, *arguments),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        started.append(process)
        return Up(process, _first_document(process, state_dir))

    yield up
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _first_document(process: subprocess.Popen[str], state_dir: Path) -> dict[str, Any]:
    """What `--json` prints when everything is ready. A dead process closes its output, so this ends."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            return dict(json.loads("".join(lines)))
    pytest.fail(f"`ryzanstein up` ended: {(state_dir / 'up.log').read_text()}")
