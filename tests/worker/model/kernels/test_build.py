"""Compiling: once a machine, without a compiler, with one that fails or is killed, in folders that cannot be trusted."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ryzanstein.worker.kernels import compilers
from ryzanstein.worker.kernels.build import NotBuilt, found, library
from ryzanstein.worker.kernels.compiling import is_whole
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions

NO_OUTPUT = """while [ "$1" != -o ]; do shift; done; echo made > "$2" """
PROGRAM = "from ryzanstein.worker.kernels import build; print(build.library())"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in the compiler's place. Returns the file to which it adds a line for each call."""

    def use(script: str) -> Path:
        path, calls = tmp_path / "compiler", tmp_path / "calls"
        path.write_text(f"#!/bin/sh\necho call >> {calls}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return calls

    return use


def times(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_it_is_compiled_once_and_only_its_owner_may_touch_it(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = compiler(NO_OUTPUT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message: list[str] = []
    first = library(building=lambda: message.append("compiling"))
    assert first.parent == tmp_path / "ryzanstein" / "kernels"
    assert list(first.parent.iterdir()) == [first]
    assert stat.S_IMODE(first.stat().st_mode) == stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    called = times(calls)
    assert library(building=lambda: message.append("again")) == found() == first
    assert (times(calls), message) == (called, ["compiling"])


def test_without_a_folder_for_caches_it_is_the_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "ryzanstein" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    (folder / built.name).write_bytes(built.read_bytes())
    assert library() == folder / built.name


@pytest.mark.lab
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
    compiler: Callable[[str], Path], tmp_path: Path, script: str, why: str
) -> None:
    compiler(script)
    with pytest.raises(NotBuilt, match=why):
        library(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([".failed"], [])


def test_a_compiler_that_failed_is_not_called_again_until_it_is_another_one(
    compiler: Callable[[str], Path], tmp_path: Path
) -> None:
    calls, cache = compiler("echo broken >&2; exit 1"), tmp_path / "cache"
    with pytest.raises(NotBuilt, match="broken"):
        library(cache)
    called = times(calls)
    for again in (library, found):
        with pytest.raises(NotBuilt, match="broken"):
            again(cache)
    assert times(calls) == called
    with pytest.raises(NotBuilt, match="broken"):
        library(cache, despite_failure=True)
    assert times(calls) > called
    compiler(NO_OUTPUT + "# repaired")
    assert library(cache).exists()


def test_a_failure_of_an_hour_ago_is_not_the_last_word(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls, cache = compiler("exit 1"), tmp_path / "cache"
    with pytest.raises(NotBuilt):
        library(cache)
    called, (record,) = times(calls), cache.iterdir()
    os.utime(record, (0, time.time() - 3700))
    with pytest.raises(NotBuilt):
        library(cache)
    assert times(calls) > called


def test_a_full_disk_is_not_the_compilers_failure(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls = compiler("echo 'fatal error: cannot write: No space left on device' >&2; exit 1")
    for _ in range(2):
        called = times(calls)
        with pytest.raises(NotBuilt, match="No space left"):
            library(tmp_path / "cache")
        assert times(calls) > called


def test_a_library_that_was_cut_short_is_compiled_again(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler(NO_OUTPUT)
    path = library(tmp_path / "cache")
    whole = path.read_bytes()
    for kept in (0, 3, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(NotBuilt, match="are not compiled"):
            found(tmp_path / "cache")
        assert library(tmp_path / "cache").read_bytes() == whole


def test_the_first_failure_ends_the_other_compilers(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler('case "$*" in *blocks.c*) exit 1;; esac; sleep 60')
    began = time.monotonic()
    with pytest.raises(NotBuilt):
        library(tmp_path / "cache")
    assert time.monotonic() - began < 30


def test_a_compiler_without_end_is_ended_by_its_processor_time(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_LIMITED", 'ulimit -S -t 1 && exec "$@"')
    compiler("while :; do :; done")
    with pytest.raises(NotBuilt, match="of processor time"):
        library(tmp_path / "cache")


def running(name: str) -> list[int]:
    """The processes whose command line has this."""
    lines = {each.pid: " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if name in line and pid != os.getpid()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_compiles_on_when_the_process_ends(
    compiler: Callable[[str], Path], tmp_path: Path, number: signal.Signals
) -> None:
    """The compiler starts a child, as compilers do: the child must end too."""
    calls = compiler(f"exec sh -c 'sleep 60; : {tmp_path}'")
    command = [sys.executable, "-P", "-m", "ryzanstein.worker.kernels"]
    process = subprocess.Popen(command, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, stdout=subprocess.DEVNULL)
    while not times(calls):
        time.sleep(0.01)
    process.send_signal(number)
    process.wait(30)
    deadline = time.monotonic() + 20
    folder = tmp_path / "ryzanstein" / "kernels"
    while (running(str(tmp_path)) or list(folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (running(str(tmp_path)), list(folder.iterdir())) == ([], [])


def test_a_group_of_compilers_that_is_over_kills_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guard is reaped: the group with its id may be another's."""
    with compilers.compilers(tmp_path) as group:
        pass
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group_id, sent: killed.append(group_id))
    group.kill()
    assert killed == []


def test_what_killed_compilers_left_is_removed(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    compiler(NO_OUTPUT)
    left = tmp_path / "cache" / "tmpabc"
    left.mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    (left / "rows.o").write_text("")
    path = library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_what_is_no_library_is_not_loaded(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("""while [ "$1" != -o ]; do shift; done; echo nonsense > "$2" """)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_kernels(RunnerOptions())
    assert opened.native is None
    assert "invalid ELF header" in opened.reason or "file too short" in opened.reason


def test_without_a_folder_for_caches_a_temporary_one_serves(
    compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its way stops even root, whom no mode does."""
    compiler(NO_OUTPUT)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert library().parent == found().parent == tmp_path / f"ryzanstein-kernels-{os.getuid()}"


def test_folders_that_cannot_be_made_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(NotBuilt, match=r"file/ryzanstein/kernels: Not a directory; .*file/ryzanstein-kernels-\d+: Not a"):
        library()


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


@pytest.mark.long
def test_the_sources_compile_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -Wall -Wextra -Werror")
    path = library(tmp_path)
    assert is_whole(path)
    NativeKernels(path)


def test_of_several_processes_one_compiles(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    calls = compiler(f"sleep 0.2; {NO_OUTPUT}")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    (path,) = map(Path, answers)
    assert list(path.parent.iterdir()) == [path]
    assert is_whole(path)
    assert times(calls) == len(list(Path(compilers.__file__).parent.glob("*.c"))) + 1, "each source, and the linker, once"


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
