"""The component that has KEDA set the number of nodes: names that exist, and KEDA's own schema."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from ryzanstein.cluster import Load, ModelReport, Node, NodeState
from ryzanstein.orchestrator.model_loads import ModelLoads

Document = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
# Run in a folder of Node.js where KEDA's models are installed; the document comes from standard input.
_VALIDATE = """
import fs from "node:fs";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
new ScaledObject(JSON.parse(fs.readFileSync(0, "utf8"))).validate();
"""


@pytest.fixture
def rendered(k8s_dir: Path, tmp_path: Path, render: Callable[[Path], list[Document]]) -> list[Document]:
    overlay = ROOT / "build" / f"overlay-{tmp_path.name}"
    overlay.mkdir(parents=True, exist_ok=True)
    try:
        parts = {"resources": ["../../k8s/base"], "components": ["../../k8s/components/autoscale"]}
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(parts))
        return render(overlay)
    finally:
        (overlay / "kustomization.yaml").unlink()
        overlay.rmdir()


def scaled(documents: list[Document]) -> Document:
    (found,) = [each for each in documents if each["kind"] == "ScaledObject"]
    return found


def test_it_scales_a_workload_that_exists_by_series_that_exist(rendered: list[Document]) -> None:
    target = scaled(rendered)["spec"]["scaleTargetRef"]
    (worker,) = [each for each in rendered if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])]
    assert scaled(rendered)["metadata"]["namespace"] == worker["metadata"]["namespace"]
    registry = CollectorRegistry()
    registry.register(ModelLoads(lambda: NODES))
    served = {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}
    for trigger in scaled(rendered)["spec"]["triggers"]:
        names = re.findall(r"ryzanstein_\w+", trigger["metadata"]["query"])
        assert names
        assert set(names) <= served.keys()
        assert all("model" in served[name] for name in names)


READY = NodeState.READY
NODES = (
    Node(
        "a",
        "h:1",
        memory_bytes=100,
        models=(
            ModelReport("m", state=READY, load=Load(3, 5, 8, 10, 100)),
            ModelReport("n", state=NodeState.STARTING, asleep=True, load=Load(9, 9, 9)),
        ),
    ),
    Node("b", "h:2", memory_bytes=100, models=(ModelReport("m", state=READY, load=Load(1, 0, 8, 50, 100)),)),
    Node("c", "h:3", memory_bytes=100, models=(ModelReport("m", state=NodeState.FAILED, load=Load(7, 7, 7)),)),
    Node("older", "h:4", state=READY, model="m", load=Load(2, 0, 4)),
)


def test_the_series_count_what_is_ready() -> None:
    registry = CollectorRegistry()
    registry.register(ModelLoads(lambda: NODES))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"ryzanstein_orchestrator_model_{name}", labels)

    assert [value(name, model="m") for name in ("running", "waiting", "capacity")] == [6, 5, 20]
    assert value("kv_used_ratio", model="m") == 0.3
    states = {state: value("replicas", model="m", state=state) for state in ("ready", "failed", "loading", "asleep")}
    assert states == {"ready": 3, "failed": 1, "loading": 0, "asleep": 0}
    assert (value("replicas", model="n", state="asleep"), value("capacity", model="n")) == (1, 0)


@pytest.mark.lab
def test_keda_takes_it(rendered: list[Document]) -> None:
    folder = ROOT / "build" / "clients" / "node"
    assert (folder / "node_modules" / "@kubernetes-models" / "keda").is_dir(), "`bash .ci/parts clients` installs it"

    def judged(document: Document) -> subprocess.CompletedProcess[str]:
        command = ["node", "--input-type=module", "--eval", _VALIDATE]
        return subprocess.run(command, cwd=folder, input=json.dumps(document), capture_output=True, text=True, check=False)

    document = scaled(rendered)
    assert judged(document).returncode == 0, judged(document).stderr
    wrong = judged({**document, "spec": {**document["spec"], "minReplicaCount": "two"}})
    assert "minReplicaCount must be integer" in wrong.stderr
