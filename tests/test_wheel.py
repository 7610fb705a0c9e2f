"""What is installed where: the laboratory is a distribution of its own, no service comes with it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAB = ROOT / "services" / "ryzanstein" / "lab"


def contents(project: Path, target: Path) -> set[str]:
    """The files of the wheel that is built from a project."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(project)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.timeout(400)
def test_the_plain_wheel_has_every_service_and_no_laboratory(tmp_path: Path) -> None:
    files = contents(ROOT, tmp_path)
    rooms = {"/".join(file.split("/")[:2]) for file in files}
    assert {"ryzanstein/router", "ryzanstein/orchestrator", "ryzanstein/worker", "ryzanstein/cli", "ryzanstein/v1"} <= rooms
    assert "ryzanstein/worker/model/kernels/draw.c" in files
    assert not [file for file in files if file.startswith("ryzanstein/lab")]


@pytest.mark.timeout(400)
def test_the_laboratorys_wheel_has_all_of_it_and_nothing_else(tmp_path: Path) -> None:
    files = {file for file in contents(LAB, tmp_path) if ".dist-info/" not in file}
    listed = subprocess.run(["git", "ls-files", "."], cwd=LAB, capture_output=True, text=True, check=True).stdout.split()
    assert {file for file in files if "__pycache__" not in file} == {f"ryzanstein/lab/{file}" for file in listed} - {
        "ryzanstein/lab/pyproject.toml"
    }


def test_without_the_laboratory_its_commands_say_what_is_missing() -> None:
    hidden = "import sys; sys.modules['ryzanstein.lab'] = None; from ryzanstein.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", hidden, "simulate"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "ryzanstein-lab" in done.stderr
