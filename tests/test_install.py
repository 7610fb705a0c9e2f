"""What `.ci/install` does: an environment that was left half-made, and torch from an index that has no build for CPUs.

pip is replaced: it records how it is called, and installs nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A module in the place of pip. It is what `python -m pip` runs in the new environment.
PIP = """
import os, pathlib, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(0)
with open(os.environ["CALLS"], "a") as calls:
    print(*sys.argv[1:], file=calls)
refused = os.environ.get("REFUSED", "")
sys.exit(1 if refused and refused in " ".join(sys.argv) else 0)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the script, and an interpreter whose environments have our pip."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/install", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python3"
    python.write_text(
        f"""#!/bin/sh
if [ "$1" = -m ] && [ "$2" = venv ]; then
    {sys.executable} -m venv --without-pip "$3" || exit 1
    packages=$(echo "$3"/lib/python3*/site-packages)
    mkdir -p "$packages/pip" && cp {tmp_path}/pip.py "$packages/pip/__main__.py" && touch "$packages/pip/__init__.py"
else
    exec {sys.executable} "$@"
fi
"""
    )
    python.chmod(0o755)
    (tmp_path / "pip.py").write_text(PIP)
    return tmp_path


def install(project: Path, kind: str = "run", **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script; returns what it said and how pip was called."""
    calls = project / "calls"
    calls.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHON": str(project / "bin/python3"), "CALLS": str(calls), **variables}
    done = subprocess.run(
        ["bash", str(project / ".ci/install"), kind], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_the_build_for_cpus_is_asked_for_by_its_name(project: Path) -> None:
    done, calls = install(project)
    assert done.returncode == 0, done.stderr
    assert calls == [
        "install torch==2.13.0+cpu",
        "install --constraint constraints.txt --editable ./clients/python --editable .[router,console,worker,tls,watch]",
    ]
    assert "setup: installing torch==2.13.0+cpu" in done.stderr


def test_where_the_index_has_none_pytorchs_own_is_asked(project: Path) -> None:
    """The public index has builds for CUDA alone, of several GB."""
    done, calls = install(project, REFUSED="install torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    assert calls[1] == "install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"


def test_where_no_index_has_one_nothing_larger_is_installed(project: Path) -> None:
    done, calls = install(project, REFUSED="torch==2.13.0+cpu")
    assert done.returncode == 1
    assert len(calls) == 2
    assert "set TORCH_INDEX to an index that has it" in done.stderr


def test_tests_need_more(project: Path) -> None:
    _, calls = install(project, "dev")
    assert calls[-1].endswith("--editable .[dev]")
    assert (project / ".venv/.run").exists()


def test_an_installation_that_was_cut_short_begins_anew(project: Path) -> None:
    done, _ = install(project, REFUSED="--editable")
    assert done.returncode == 1
    assert "The next call begins anew" in done.stderr
    (project / ".venv/half").write_text("")
    done, calls = install(project)
    assert done.returncode == 0, done.stderr
    assert "was not finished: .venv is made anew" in done.stderr
    assert len(calls) == 2
    assert not (project / ".venv/half").exists()


@pytest.mark.parametrize("broken", ["bin/python", "lib"])
def test_an_environment_that_is_broken_is_made_anew(project: Path, broken: str) -> None:
    install(project)
    path = project / ".venv" / broken
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done, _ = install(project)
    assert done.returncode == 0, done.stderr
    assert "was not finished: .venv is made anew" in done.stderr
    assert (project / ".venv/bin/python").exists()
