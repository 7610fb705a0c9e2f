"""A real vLLM on this machine's CPUs, and nodes beside it: `make test-engines`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.worker.engines.child.litter import present, remove_new
from ryzanstein.worker.engines.vllm.packages import write_plugin

ROOT = Path(__file__).parents[4]
SAMPLER = "ryzanstein.worker.engines.vllm.inside.sampler:Sampler"
START_S = 300
NONE: Mapping[str, str] = {}
ON_GPU = os.environ.get("RYZANSTEIN_TEST_DEVICE") == "cuda"
"""vLLM is one for GPUs: see `.ci/gpu`. Nodes of ours compute on the CPU all the same."""
VLLM = ROOT / ("build/gpu/vllm" if ON_GPU else "build/vllm") / "bin/python"
GPU_FLAGS = ["--attention-backend", "TRITON_ATTN", "--gpu-memory-utilization", "0.1"] if ON_GPU else []
"""Its other attention kernels do not take numbers of 32 bits; several servers share the GPU's memory."""


class VllmServer:
    """`vllm serve` in a session of its own. `sampler`: the logits processor that it loads; empty: none."""

    def __init__(
        self, model: Path, log: Path, *, sampler: str = SAMPLER, dtype: str = "float32", variables: Mapping[str, str] = NONE
    ) -> None:
        assert VLLM.exists(), "vLLM is missing: `make test-engines` installs it"
        (self.port,) = free_ports(1)
        self.log, self.model = log, model
        self._shm = present()
        paths = log.with_name("plugin")
        write_plugin(paths)
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(paths)}
        environment |= variables
        command = [
            str(VLLM),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        command += ["--served-model-name", "theirs", "--dtype", dtype, "--max-model-len", "512", "--enforce-eager"]
        command += ["--max-num-seqs", "16", *(["--logits-processors", sampler] if sampler else []), *GPU_FLAGS]
        # On a core of its own: its threads spin, and an agent and a router that get no time look silent to each other.
        cores = [] if ON_GPU else ["taskset", "--cpu-list", str(max(os.sched_getaffinity(0)))]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*cores, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-6000:])

    def health(self) -> int:
        """The status of its own health."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return int(answer.status)

    def core(self) -> int:
        """The process that computes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (core,) = [child.pid for child in children if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name()]
        return core

    def close(self) -> None:
        descendants = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for process in descendants:
            process.kill()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(descendants, timeout=20)  # what they have mapped is in use until they are gone
        remove_new(self._shm)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo's tokenizer, whose heads have a size that vLLM supports."""
    folder = tmp_path_factory.mktemp("models") / "small"
    command = [sys.executable, "-m", "ryzanstein.tools.synthesize.command", str(folder), "--preset", "context"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(model, tmp_path_factory.mktemp("vllm") / "log")
    try:
        server.wait()
        yield server
    finally:
        server.close()
