"""The example for Node.js, as it stands, while the router that it reads from is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

ROOT = Path(__file__).parents[3]
MODULES = ROOT / "build/clients/node/node_modules"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    spec = ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, num_routers=2, state_dir=tmp_path / "state")
    with LocalCluster(spec) as started:
        yield started


def test_the_answer_outlives_its_router(cluster: LocalCluster, tmp_path: Path) -> None:
    assert MODULES.exists(), "npm packages are missing: `bash .ci/parts clients` installs them"
    shutil.copytree(ROOT / "clients" / "node", tmp_path / "client")
    (tmp_path / "client" / "node_modules").symlink_to(MODULES)
    command = ["node", "answer.mjs", ",".join(cluster.router_addresses), "Count from 1 to 150."]
    environment = {"PATH": os.environ["PATH"], "RYZANSTEIN_PROTOS": str(ROOT / "protos")}
    with subprocess.Popen(
        command, cwd=tmp_path / "client", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        begun = reading.stdout.read(40)
        cluster.kill(cluster.router_names[0])
        rest, errors = reading.stdout.read(), reading.stderr.read()
    assert reading.returncode == 0, errors
    assert begun + rest == " ".join(map(str, range(1, 151))) + "\n"
