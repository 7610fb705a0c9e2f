"""A trained chat model, SmolLM2 135M, on two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster


@dataclass(frozen=True)
class RealCluster:
    """Two nodes of one rank each, and the official client."""

    cluster: LocalCluster
    http: openai.OpenAI
    model: str
    path: Path


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[RealCluster]:
    with LocalCluster(ClusterSpec(smollm2, num_nodes=2, tp=1)) as cluster:
        http = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=120)
        yield RealCluster(cluster, http, http.models.list().data[0].id, smollm2)
