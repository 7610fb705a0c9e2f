"""No engine builds the images here; what can go wrong in their files is checked by reading them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

DOCKERFILES = {"node.Dockerfile": "node", "router.Dockerfile": "router", "worker.Dockerfile": "worker"}


@pytest.fixture(params=sorted(DOCKERFILES))
def dockerfile(request: pytest.FixtureRequest, k8s_dir: Path) -> Path:
    return k8s_dir / "images" / request.param


def instructions(path: Path) -> list[tuple[str, str]]:
    """(FROM, ...), (COPY, ...), ...; comments gone, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def project(k8s_dir: Path) -> dict[str, Any]:
    return tomllib.loads((k8s_dir.parent / "pyproject.toml").read_text())


def test_what_is_copied_exists_and_is_not_ignored(dockerfile: Path, k8s_dir: Path) -> None:
    root = k8s_dir.parent
    included = [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(dockerfile):
        if word == "COPY" and not rest.startswith("--from"):
            for source in [each for each in rest.split()[:-1] if not each.startswith("--")]:
                assert list(root.glob(source)), source
                assert source.split("/")[0] in included


def test_the_extra_that_is_installed_exists(dockerfile: Path, k8s_dir: Path) -> None:
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", dockerfile.read_text())
    assert DOCKERFILES[dockerfile.name] in extras.split(",")
    assert set(extras.split(",")) <= project(k8s_dir)["project"]["optional-dependencies"].keys()


def test_the_last_stage_runs_our_command_as_nobody_special(dockerfile: Path, k8s_dir: Path) -> None:
    last: dict[str, str] = {}
    for word, rest in instructions(dockerfile):
        last = {} if word == "FROM" else {**last, word: rest}
    assert last["USER"] == "65532:65532"
    assert last["ENTRYPOINT"] == '["ryzanstein"]'
    assert "ryzanstein" in project(k8s_dir)["project"]["scripts"]
    assert "RUN" not in last


def test_what_the_last_stage_copies_is_readable_by_its_user(dockerfile: Path) -> None:
    """A repository that was cloned under umask 077 has files that root alone may read."""
    last = dockerfile.read_text().rpartition("\nFROM ")[2]
    copies = [line for line in last.splitlines() if line.startswith("COPY ") and "--from=" not in line]
    assert [line for line in copies if "--chmod=0755 " not in line] == []


def test_torch_is_in_the_workers_image_only_and_pinned_as_in_the_constraints(k8s_dir: Path) -> None:
    constraints = (k8s_dir.parent / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^torch==(\S+)$", constraints, flags=re.MULTILINE)
    images = k8s_dir / "images"
    assert f'"torch=={pinned}+${{TORCH_BUILD}}"' in (images / "worker.Dockerfile").read_text()
    extras = project(k8s_dir)["project"]["optional-dependencies"]
    for name in ("node", "router"):
        assert "torch" not in "".join(rest for _, rest in instructions(images / f"{name}.Dockerfile"))
        assert not any(re.match(r"torch\b", each) for each in extras[name])


def test_the_demo_model_is_where_the_local_overlay_looks_for_it(k8s_dir: Path) -> None:
    copies = [rest for word, rest in instructions(k8s_dir / "images" / "worker.Dockerfile") if word == "COPY"]
    (demo,) = [rest.split()[-1].rstrip("/") for rest in copies if "shared/ryzanstein/demo/" in rest]
    assert f"value: {demo}\n" in (k8s_dir / "overlays" / "local-cpu" / "worker.yaml").read_text()
