"""The commands of docs/operate/load.md, run against a cluster: ours, and those of tools that others wrote."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.lab]
ROOT = Path(__file__).parents[3]
TOOLS = {"ryzanstein": ".venv", "guidellm": "build/load/guidellm", "aiperf": "build/load/aiperf"}
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/operate/load.md").read_text(), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if "bench soak" not in line]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1)) as cluster:
        yield cluster


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:5]))
def test_a_command_of_the_page_works(command: str, cluster: LocalCluster, tmp_path: Path) -> None:
    name, *arguments = shlex.split(command.replace("DIRECTORY", str(MODEL_DIR)))
    arguments = [each.replace("http://127.0.0.1:8000", cluster.http_url) for each in arguments]
    if name == "ryzanstein":
        arguments += ["--router", cluster.router_address, "--http", cluster.http_url.partition("://")[2]]
    program = ROOT / TOOLS[name] / "bin" / name
    done = subprocess.run([str(program), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if "--page" in arguments:
        assert "<svg" in (tmp_path / "load.html").read_text()
        assert json.loads((tmp_path / "load.json").read_text())["verdict"]["answers"] == 80
    if name == "guidellm":
        (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] >= 10
        assert totals["errored"] == 0
    if name == "aiperf":
        figures = json.loads((tmp_path / "aiperf/profile_export_aiperf.json").read_text())
        assert figures["request_count"]["avg"] == 10


def test_the_page_has_each_tool() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(TOOLS)
