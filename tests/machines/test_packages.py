"""The wheel, installed as users do: with its extras and without a compiler, and without its extras."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EndsIn = Callable[[str, str, str], None]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The wheels of the client and of the whole, with the kernels of every level."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = str(ROOT / "clients" / "python"), str(ROOT)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *sources]
    subprocess.run(command, check=True, timeout=540)
    (client,), (whole,) = folder.glob("ryzanstein_client-*.whl"), folder.glob("ryzanstein-*.whl")
    return str(client), str(whole)


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


def test_the_wheel_without_a_compiler(wheels: tuple[str, str], tmp_path: Path, ends_in: EndsIn) -> None:
    command = environment(tmp_path / "env", *wheels, others=True)
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


def test_the_wheel_without_its_extras(wheels: tuple[str, str], tmp_path: Path, ends_in: EndsIn) -> None:
    command = environment(tmp_path / "env", *wheels, others=False)
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


def test_the_client_alone(wheels: tuple[str, str], tmp_path: Path, ends_in: EndsIn) -> None:
    client, whole = (set(zipfile.ZipFile(each).namelist()) for each in wheels)
    assert client & whole == set()
    assert {"ryzanstein/client/py.typed", "ryzanstein/errors.py", "ryzanstein/v1/inference_pb2.py"} <= client
    command = environment(tmp_path / "env", wheels[0], others=False)
    program = (
        "import sys; from ryzanstein.client import AsyncClient, Client\n"
        "try: Client('127.0.0.1:1', patience_s=0.2).chat('x')\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'pydantic', 'typer')))\n"
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('ryzanstein.')}))\n"
    )
    python = str(command.with_name("python"))
    done = subprocess.run([python, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["RouterUnreachable", "[]", "['addresses', 'client', 'errors', 'statuses', 'v1']"]
    ends_in(
        "the client's wheel alone", "from ryzanstein.client import Client", "no torch, no service, no other package of ours"
    )
