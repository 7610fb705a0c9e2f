"""Compiling: once, by several at once, without a compiler, with one that fails, in folders that cannot be trusted."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ryzanstein.worker.model.kernels.build import NotBuilt, library
from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.kernels.opening import open_kernels
from ryzanstein.worker.model.options import RunnerOptions
from ryzanstein.worker.model.refusal import ModelRefused


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the compiler's place."""

    def use(script: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return use


def test_it_is_compiled_once_and_only_its_owner_may_touch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = library()
    written_ns = first.stat().st_mtime_ns
    assert first.parent == tmp_path / "ryzanstein" / "kernels"
    assert list(first.parent.iterdir()) == [first]
    assert stat.S_IMODE(first.stat().st_mode) == stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert library() == first
    assert first.stat().st_mtime_ns == written_ns


def test_without_a_folder_for_caches_it_is_the_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "ryzanstein" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    (folder / built.name).write_bytes(built.read_bytes())
    assert library() == folder / built.name


def test_another_compiler_or_option_makes_another_library(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -g")
    assert library(tmp_path).name != built.name


@pytest.mark.parametrize("name", ["/nonexistent", "", "'"], ids=["nowhere", "empty", "unbalanced"])
def test_without_a_compiler_torch_serves_and_the_reason_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_kernels(RunnerOptions())
    assert opened.native is None
    assert ("no C compiler" in opened.reason and name in opened.reason) or "No closing quotation" in opened.reason
    with pytest.raises(ModelRefused, match="kernels native: "):
        open_kernels(RunnerOptions(kernels="native"))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo one >&2; echo two >&2; exit 1", "compiler: two$"),
        (
            "echo 'rows.c:3:1: error: unknown type' >&2; echo '  |  ^~~' >&2; exit 1",
            "compiler: rows.c:3:1: error: unknown type$",
        ),
        ("echo 'ld: cannot find -lgomp' >&2; echo 'error: ld returned 1' >&2; exit 1", "compiler: ld: cannot find -lgomp$"),
        ("exit 3", "compiler: failed$"),
        ("exit 0", "No such file"),
    ],
    ids=["last line", "first error", "linker", "silent", "makes nothing"],
)
def test_why_a_compiler_failed_is_said_and_nothing_is_left(
    compiler: Callable[[str], None], tmp_path: Path, script: str, why: str
) -> None:
    compiler(script)
    with pytest.raises(NotBuilt, match=why):
        library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_no_library_is_not_loaded(
    compiler: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("""while [ "$1" != -o ]; do shift; done; echo nonsense > "$2" """)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_kernels(RunnerOptions())
    assert opened.native is None
    assert "invalid ELF header" in opened.reason or "file too short" in opened.reason


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its way stops even root, whom no mode does."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    opened = open_kernels(RunnerOptions())
    assert opened.native is None
    assert opened.reason.startswith(f"{tmp_path}/file/ryzanstein/kernels: Not a directory; ")


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, built: Path) -> None:
    (tmp_path / built.name).write_bytes(built.read_bytes())
    tmp_path.chmod(0o777)
    with pytest.raises(NotBuilt, match="is writable by other users"):
        library(tmp_path)


def test_a_library_that_others_may_write_is_refused(tmp_path: Path, built: Path) -> None:
    (tmp_path / built.name).write_bytes(built.read_bytes())
    (tmp_path / built.name).chmod(0o722)
    with pytest.raises(NotBuilt, match=rf"{built.name} is writable by other users"):
        library(tmp_path)


def test_a_library_of_another_user_is_refused(tmp_path: Path, built: Path) -> None:
    path = tmp_path / built.name
    if os.getuid() == 0:
        path.write_bytes(built.read_bytes())
        os.chown(path, 65534, 65534)
    else:
        path.symlink_to("/etc/passwd")
    with pytest.raises(NotBuilt, match=rf"{built.name} is owned by another user"):
        library(tmp_path)


def test_the_sources_compile_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -Wall -Wextra -Werror")
    assert library(tmp_path).exists()


def test_processes_may_compile_at_once(tmp_path: Path) -> None:
    program = "from ryzanstein.worker.model.kernels import build; print(build.library())"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    (path,) = map(Path, answers)
    assert list(path.parent.iterdir()) == [path]
    NativeKernels(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_there_are_none_for_other_dtypes(dtype: str) -> None:
    opened = open_kernels(RunnerOptions(dtype=dtype))
    assert (opened.native, opened.reason) == (None, f"no native kernels for {dtype} on cpu")
    with pytest.raises(ModelRefused, match=f"kernels native: no native kernels for {dtype} on cpu"):
        open_kernels(RunnerOptions(dtype=dtype, kernels="native"))


def test_torch_may_be_chosen() -> None:
    opened = open_kernels(RunnerOptions(kernels="torch"))
    assert (opened.native, opened.reason) == (None, "chosen")


def test_they_are_there_by_default() -> None:
    opened = open_kernels(RunnerOptions())
    assert opened.native is not None
    assert opened.reason == ""
