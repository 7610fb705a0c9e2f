"""A cluster that has 15 % of a core answers a long prompt: slowly, and without beginning it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.control_groups import limited

START_S, ANSWER_S = 400, 500
CORES = 0.15


@pytest.fixture
def slow_cluster(smollm2: Path, tmp_path: Path) -> Iterator[str]:
    """The HTTP address of a cluster of one node."""
    options = ["--nodes", "1", "--tp", "1", "--http-port", "0", "--grpc-port", "0", "--orchestrator-port", "0"]
    with limited(cores=CORES) as within:
        command = [*within, sys.executable, "-P", "-m", "ryzanstein.cli", "up", *options, "--json"]
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
        command += ["--model", str(smollm2)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as process:
            try:
                assert process.stdout is not None
                document = "".join(iter(process.stdout.readline, "}\n")) + "}"
                (address,) = json.loads(document)["http"]
                yield address
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(120)
                finally:
                    process.kill()


@pytest.mark.timeout(START_S + ANSWER_S + 120)
def test_a_long_prompt_on_a_slow_machine_is_computed_once(slow_cluster: str) -> None:
    words = " ".join(f"word{number}" for number in range(700))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 5, "temperature": 0}
    began = time.monotonic()
    answer = httpx.post(f"{slow_cluster}/v1/chat/completions", json=body, timeout=ANSWER_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > 2000
    metrics = httpx.get(f"{slow_cluster}/metrics", timeout=60, trust_env=False).text
    failovers = [line for line in metrics.splitlines() if line.startswith("ryzanstein_router_failovers_total{")]
    assert failovers
    assert all(line.endswith(" 0.0") for line in failovers), failovers
    print(f"answered after {time.monotonic() - began:.0f} s")
