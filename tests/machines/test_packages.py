"""The wheel, installed as users do: with its extras and without a compiler, and without its extras."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EndsIn = Callable[[str, str, str], None]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, with the kernels of every level."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=540)
    (path,) = folder.glob("*.whl")
    return path


def environment(folder: Path, *packages: str, others: bool) -> Path:
    """A new environment; `others`: what this one has besides our own code can be imported in it too."""
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, *(["--no-deps", "--no-index"] if others else []), *packages], check=True, timeout=540)
    if others:
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/ryzanstein"


def run(command: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it as a node without a compiler does, in the root of the file system."""
    bare = {"PATH": "/nonexistent", "HOME": str(home), "TMPDIR": str(home)}
    return subprocess.run(
        [str(command), *arguments], cwd="/", env=bare, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_wheel_without_a_compiler(wheel: Path, tmp_path: Path, ends_in: EndsIn) -> None:
    command = environment(tmp_path / "env", str(wheel), others=True)
    done = run(command, tmp_path, "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 of 13" in done.stdout
    assert "kernels" not in done.stdout + done.stderr, "those of the wheel are used, and nothing is said of it"
    assert not (tmp_path / ".cache").exists()
    ends_in(
        "the wheel in an environment without a compiler, from `/`",
        "ryzanstein demo",
        "13 of 13 promises kept; packaged kernels",
    )


def test_the_wheel_without_its_extras(wheel: Path, tmp_path: Path, ends_in: EndsIn) -> None:
    command = environment(tmp_path / "env", str(wheel), others=False)
    assert run(command, tmp_path, "--version").returncode == 0
    for arguments, extras in (
        (("demo",), "router,worker"),
        (("worker",), "worker"),
        (("router",), "router"),
        (("convert",), "worker"),
    ):
        done = run(command, tmp_path, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert f"pip install 'ryzanstein[{extras}]'" in done.stderr
    done = run(command, tmp_path, "bench")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "./lab" in done.stderr
    ends_in("the wheel without its extras", "ryzanstein demo", "one sentence that names the extras to install")
