"""What is installed where: the kernels come compiled; the client and the laboratory are distributions of their own."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = "ryzanstein/worker/kernels"
LEVELS = {"x86_64": {"x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni"}, "aarch64": {"aarch64"}}
MACHINE = {"x86_64": 62, "aarch64": 183}  # in an ELF header


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with what builds need, so that it is not fetched for each."""
    folder = tmp_path_factory.mktemp("builder")
    venv.create(folder, with_pip=True)
    projects = [ROOT / "pyproject.toml", ROOT / "clients" / "python" / "pyproject.toml"]
    required = [each for path in projects for each in tomllib.loads(path.read_text())["build-system"]["requires"]]
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *required], check=True, timeout=600)
    return folder / "bin" / "python"


def build(builder: Path, project: Path, target: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [builder, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", target, project]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=500, check=False)


def built(builder: Path, project: Path, target: Path, **variables: str) -> Path:
    """The wheel that is built from a project."""
    done = build(builder, project, target, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain wheel for this machine."""
    return built(builder, ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def client(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the client."""
    return built(builder, ROOT / "clients" / "python", tmp_path_factory.mktemp("client"))


@pytest.mark.timeout(1200)
def test_the_plain_wheel_has_every_service_and_no_laboratory(wheel: Path) -> None:
    files = contents(wheel)
    rooms = {"/".join(file.split("/")[:2]) for file in files}
    assert {f"ryzanstein/{name}" for name in ("router", "orchestrator", "worker", "console", "cli")} <= rooms
    assert f"{KERNELS}/draw.c" in files
    assert {f"ryzanstein/console/static/{name}" for name in ("index.html", "app.css", "main.js")} <= files
    assert not [file for file in files if file.startswith(("ryzanstein/lab", "ryzanstein/client", "ryzanstein/v1"))]


@pytest.mark.timeout(1200)
def test_no_file_is_in_two_wheels(wheel: Path, client: Path) -> None:
    files = contents(client)
    assert {"ryzanstein/client/py.typed", "ryzanstein/errors.py", "ryzanstein/v1/inference_pb2.pyi"} <= files
    assert files & contents(wheel) == set()


def check_kernels(wheel: Path, machine: str) -> None:
    assert wheel.name.startswith("ryzanstein-0.1.0-py3-none-manylinux_2_")
    assert wheel.name.endswith(f"_{machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
        (description,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
    assert set(libraries) == {f"{KERNELS}/lib/{level}.so" for level in LEVELS[machine]}
    assert all(int.from_bytes(library[18:20], "little") == MACHINE[machine] for library in libraries.values())
    assert "Root-Is-Purelib: false\n" in description
    assert f"Tag: {wheel.stem.split('-', 2)[2]}\n" in description


@pytest.mark.timeout(1200)
def test_it_carries_the_kernels_of_every_level_and_is_for_this_architecture(wheel: Path) -> None:
    check_kernels(wheel, platform.machine())
    assert not (ROOT / "services" / KERNELS / "lib").exists()


@pytest.mark.timeout(1200)
def test_a_cross_compiler_builds_the_wheel_of_another_architecture(
    builder: Path, part: Callable[[str], str], tmp_path: Path
) -> None:
    compiler = part("aarch64-linux-gnu-gcc")
    check_kernels(built(builder, ROOT, tmp_path, RYZANSTEIN_WHEEL_ARCH="aarch64", CC=compiler), "aarch64")


@pytest.mark.timeout(1200)
def test_without_a_compiler_a_wheel_is_built_only_if_it_shall_have_no_kernels(builder: Path, tmp_path: Path) -> None:
    failed = build(builder, ROOT, tmp_path, CC="/nonexistent")
    assert failed.returncode != 0
    assert "no kernels for the wheel: no C compiler '/nonexistent'" in failed.stdout + failed.stderr
    assert "set RYZANSTEIN_WHEEL_KERNELS=no" in failed.stdout + failed.stderr
    assert not list(tmp_path.iterdir())
    pure = built(builder, ROOT, tmp_path, CC="/nonexistent", RYZANSTEIN_WHEEL_KERNELS="no")
    assert pure.name == "ryzanstein-0.1.0-py3-none-any.whl"
    assert not [file for file in contents(pure) if file.endswith(".so")]


@pytest.fixture(scope="module")
def installed(wheel: Path, client: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel and no other code of ours. It shares the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel), str(client)], check=True, timeout=300)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The variables of a node without a compiler, and with no library in its cache."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "RYZANSTEIN_KERNELS": "native"}


@pytest.mark.timeout(1200)
def test_an_environment_without_a_compiler_computes_with_the_packaged_library(installed: Path, bare: dict[str, str]) -> None:
    program = """
import torch
from ryzanstein.worker.kernels import opening, openmp
from ryzanstein.worker.settings.options import RunnerOptions
before = openmp.loaded_openmp()
opened = opening.open_kernels(RunnerOptions(kernels="native"))
weight = torch.ones(512, 512)
product = opened.native.floats.product(weight, opened.native.floats.pack(weight, torch.float32), None, 512)
assert product.eq(512).all()
assert openmp.loaded_openmp() == before
print(opening.__file__, opened.library, sep="\\n")
"""
    command = [installed / "python", "-c", program]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    module, library = done.stdout.splitlines()
    assert Path(module).is_relative_to(installed.parent)
    assert library.split()[2] in LEVELS[platform.machine()]


@pytest.fixture
def cluster(installed: Path, bare: dict[str, str], tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The addresses of a cluster of one node that serves the demo model, started as users start it."""
    ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
    command = [installed / "ryzanstein", "up", "--json", "--nodes", "1", "--tp", "1", "--state-dir", tmp_path / "state", *ports]
    log = tmp_path / "up.log"
    with log.open("w") as errors, subprocess.Popen(command, env=bare, stdout=subprocess.PIPE, stderr=errors, text=True) as up:
        assert up.stdout is not None
        try:
            lines: list[str] = []
            while not lines or lines[-1] not in ("}\n", ""):
                lines.append(up.stdout.readline())
            assert lines[-1], log.read_text()
            yield json.loads("".join(lines))
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)


@pytest.mark.timeout(1200)
def test_it_serves_the_demo_model_with_native_kernels(cluster: dict[str, Any], bare: dict[str, str]) -> None:
    question = {"messages": [{"role": "user", "content": "Count from 1 to 9."}], "temperature": 0}
    asked = urllib.request.Request(f"{cluster['http'][0]}/v1/chat/completions", json.dumps(question).encode())
    asked.add_header("content-type", "application/json")
    with urllib.request.urlopen(asked, timeout=60) as response:
        answer = json.load(response)
    assert "1 2 3 4 5 6 7 8 9" in answer["choices"][0]["message"]["content"].replace(",", "")
    (node,) = cluster["nodes"]
    with urllib.request.urlopen(cluster["metrics"][node], timeout=10) as page:
        gauges = [line for line in page.read().decode().splitlines() if line.startswith("ryzanstein_worker_native_kernels{")]
    assert [gauge.split()[-1] for gauge in gauges] == ["1.0"]
    log = "".join(path.read_text() for path in Path(cluster["state_dir"]).rglob("*.log"))
    assert not (Path(bare["HOME"]) / ".cache").exists(), "nothing was compiled"
    assert any(f'"kernels": "packaged for {level}"' in log for level in LEVELS[platform.machine()])


@pytest.mark.timeout(1200)
def test_the_laboratorys_wheel_has_all_of_it_and_nothing_else(builder: Path, tmp_path: Path) -> None:
    project = ROOT / "lab"
    files = {file for file in contents(built(builder, project, tmp_path)) if ".dist-info/" not in file}
    listed = subprocess.run(["git", "ls-files", "ryzanstein"], cwd=project, capture_output=True, text=True, check=True)
    assert {file for file in files if "__pycache__" not in file} == set(listed.stdout.split())


def test_without_the_laboratory_its_commands_say_what_is_missing() -> None:
    hidden = "import sys; sys.modules['ryzanstein.lab'] = None; from ryzanstein.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", hidden, "simulate"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "./lab" in done.stderr
