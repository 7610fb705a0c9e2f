"""A trained small model and a random one with Qwen 3's tokenizer and template, each on a cluster of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster

BUILD = Path(__file__).parents[3] / "build"
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Served:
    """A model, and where it is served."""

    url: str
    model: str

    def answered(self) -> Counter[str]:
        """How many requests the router has answered, by status."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        counts: Counter[str] = Counter()
        for line in lines:
            if line.startswith("ryzanstein_router_requests_total{") and 'face="http"' in line:
                counts[line.partition('code="')[2].partition('"')[0]] += int(float(line.split()[-1]))
        return counts

    def run(self, program: list[str], folder: Path) -> list[dict[str, Any]]:
        """Runs a client's loops, and returns what it reported of each."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [*program, f"{self.url}/v1", self.model],
            cwd=folder,
            env={**environment, "LANGSMITH_TRACING": "false", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"loop"')]


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "smollm2":
        path: Path = request.getfixturevalue("smollm2")
    else:
        path = tmp_path_factory.mktemp("models") / "qwen3"
        _write_random_qwen3(path)
    with LocalCluster(ClusterSpec(path, num_nodes=1, tp=1, model_names=(request.param,))) as cluster:
        yield Served(cluster.http_url, request.param)


@pytest.fixture(scope="session")
def node_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs for Node.js beside their packages, where it looks for them."""
    folder = tmp_path_factory.mktemp("node")
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, folder)
    (folder / "node_modules").symlink_to(BUILD / "clients/node/node_modules")
    return folder


def _write_random_qwen3(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    source = BUILD / "tokenizers/qwen3/models"
    assert source.exists(), f"{source} is missing: `bash .ci/parts tokenizers` fetches real tokenizers"
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": 151643, "eos_token_id": 151645}
    config = Qwen3Config(
        vocab_size=151936,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **shape,
        **special,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
