"""Checks on GPUs: `make gpu`. None has run on hardware yet; what cannot run here is skipped, and named at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.worker.engines.vllm.packages import write_plugin

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "shared/ryzanstein/demo"
VLLM = ROOT / "build/gpu/vllm/bin/vllm"


def need(count: int) -> None:
    """Skips the test where fewer GPUs are visible."""
    if (found := torch.cuda.device_count()) < count:
        pytest.skip(f"needs {count} GPUs, {found} are visible")


@pytest.fixture(autouse=True)
def gpu() -> None:
    need(1)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the tokenizer of the demo's, whose heads have a size that every attention kernel supports."""
    folder = tmp_path_factory.mktemp("models") / "small"
    command = [sys.executable, "-m", "ryzanstein.tools.synthesize.command", str(folder), "--preset", "context"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def vllm(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM on a GPU, with our sampler."""
    need(1)
    if not VLLM.exists():
        pytest.skip("vLLM is not installed in build/gpu/vllm")
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("vllm") / "log"
    write_plugin(plugin := log.with_name("plugin"))
    environment = os.environ | {"PYTHONPATH": str(plugin)}
    sampler = "ryzanstein.worker.engines.vllm.inside.sampler:Sampler"
    flags = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--logits-processors",
        sampler,
    ]
    with log.open("wb") as output:
        command = [str(VLLM), "serve", str(small_model), *flags, "--enforce-eager", "--gpu-memory-utilization", "0.3"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        ends = time.monotonic() + 220
        while time.monotonic() < ends:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            except OSError:
                time.sleep(0.5)
            else:
                break
        else:
            raise AssertionError(log.read_text()[-4000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()
