"""docs/start/kubernetes.md and the files in k8s/ agree."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/start/kubernetes.md").read_text()


def test_every_file_that_a_command_names_exists() -> None:
    named = re.findall(r"(?:-f|-k|`)\s?(k8s/[\w/.-]+)", PAGE)
    assert len(named) >= 4
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_images_have_the_names_and_tags_that_the_manifests_want() -> None:
    built = set(re.findall(r"-t (ryzanstein/[\w-]+:[\w.-]+)", PAGE))
    wanted = set()
    for folder in ("base", "overlays/gpu", "components/vllm"):
        for image in yaml.safe_load((ROOT / "k8s" / folder / "kustomization.yaml").read_text())["images"]:
            wanted.add(f"{image['name']}:{image['newTag']}")
    assert built == wanted
    assert set(re.findall(r"kind load docker-image (.*)", PAGE)[0].split()) <= built


def test_the_ingress_of_the_page_is_valid_strictly() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    ingress = yaml.safe_load(block)
    kubernetes_validate.validate(ingress, "1.32", strict=True)
    service = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert service == {"name": "router", "port": {"name": "http"}}
