"""The package's library is used at once, whatever compiler there is; without one for this CPU the reason says all."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels import packaged
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.opening import COMPILED, open_kernels
from ryzanstein.worker.kernels.packaged import packaged_library
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a folder that of the installation."""
    return lambda folder: monkeypatch.setattr(packaged, "FOLDER", folder)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_packaged_library_computes(
    libraries: Path,
    installed: Callable[[Path], None],
    kernels: NativeKernels,
    results: Callable[[NativeKernels], dict[str, Tensor]],
) -> None:
    installed(libraries)
    opened = open_kernels(RunnerOptions(kernels="native"))
    assert opened.native is not None
    level = packaged_library(libraries).level.name
    assert opened.library == f"packaged for {level}"
    ours, compiled = results(opened.native), results(kernels)
    assert all(torch.equal(ours[name], expected) for name, expected in compiled.items())


def test_no_compiler_is_called_where_a_library_is_packaged(
    libraries: Path, installed: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(libraries)
    (tmp_path / "cc").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_kernels(RunnerOptions())
    assert opened.native is not None
    assert not (tmp_path / "called").exists()


def test_without_a_packaged_library_one_is_compiled(installed: Callable[[Path], None], tmp_path: Path) -> None:
    installed(tmp_path / "unread")
    assert open_kernels(RunnerOptions()).library == COMPILED


@pytest.mark.usefixtures("no_compiler")
def test_without_both_the_reason_says_both(installed: Callable[[Path], None], tmp_path: Path) -> None:
    installed(tmp_path / "none")
    opened = open_kernels(RunnerOptions())
    why = "no C compiler '/nonexistent': install one or set CC; no libraries are packaged with this installation"
    assert (opened.native, opened.reason, opened.library) == (None, why, "")
    with pytest.raises(ModelRefused, match=f"kernels native: {why}"):
        open_kernels(RunnerOptions(kernels="native"))


@pytest.mark.usefixtures("no_compiler")
def test_a_library_of_another_architecture_is_named_as_missing(installed: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "another.so").write_bytes(b"")
    installed(tmp_path)
    assert "is packaged with this installation" in open_kernels(RunnerOptions()).reason


@pytest.mark.usefixtures("no_compiler")
def test_a_cpu_below_every_level_uses_torch(
    libraries: Path, installed: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(libraries)
    (tmp_path / "cpuinfo").write_text("flags : fpu sse sse2\nFeatures : fp\n")
    monkeypatch.setattr(packaged, "_CPUINFO", tmp_path / "cpuinfo")
    opened = open_kernels(RunnerOptions())
    assert opened.native is None
    assert "; the CPU lacks " in opened.reason


@pytest.mark.usefixtures("no_compiler")
def test_a_packaged_library_that_is_none_is_not_loaded(
    libraries: Path, installed: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / packaged_library(libraries).path.name).write_text("nonsense, but longer than a header of an ELF file is" * 9)
    installed(tmp_path)
    opened = open_kernels(RunnerOptions())
    assert opened.native is None
    assert "invalid ELF header" in opened.reason


def test_it_computes_with_the_threads_of_torch_and_loads_no_other_openmp(libraries: Path) -> None:
    """In a process of its own: this one may have loaded a library of another test."""
    program = f"""
import torch
from pathlib import Path
from ryzanstein.worker.kernels import packaged, opening, openmp
from ryzanstein.worker.settings.options import RunnerOptions
packaged.FOLDER = Path({str(libraries)!r})
before = openmp.loaded_openmp()
opened = opening.open_kernels(RunnerOptions(kernels="native"))
weight = torch.ones(512, 512)
packed = opened.native.floats.pack(weight, torch.float32)
assert opened.native.floats.product(weight, packed, None, 512).eq(512).all()
assert openmp.loaded_openmp() == before, (before, openmp.loaded_openmp())
print(*before)
"""
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "", "HOME": "/nonexistent"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (path,) = done.stdout.split()
    assert Path(path).is_relative_to(Path(torch.__file__).parents[1]), "torch brings none: the system's is used"
