"""Compiles the kernels for this machine's CPU, once: the library stays in the user's cache folder.

`library` may compile; `found` never does, and is what ranks use. A lock on the folder makes sure that
one process at a time compiles. A compiler that failed is not called again for an hour.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ryzanstein.worker.kernels.compilers import NotBuilt
from ryzanstein.worker.kernels.compiling import Target, compile_library, find_compiler, ingredients, is_whole
from ryzanstein.worker.kernels.levels import chosen_level

__all__ = ["NotBuilt", "found", "library"]

_AGAIN_S = 3600.0
_KEPT_LIBRARIES = 16
_MAX_REASON_CHARS = 1024


def library(
    cache_dir: Path | None = None, *, building: Callable[[], None] = lambda: None, despite_failure: bool = False
) -> Path:
    """Returns the compiled library, from the cache if it was compiled before.

    `building` is called before it is compiled. `despite_failure`: also if it has failed within the
    last hour. Raises NotBuilt.
    """
    compiler = find_compiler()
    name, reasons = _name(compiler), []
    for folder in _folders(cache_dir):
        try:
            return _in(folder, name, compiler, building, despite_failure)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise NotBuilt("; ".join(reasons))


def found(cache_dir: Path | None = None) -> Path:
    """Returns the library if it was compiled before. Raises NotBuilt with what is in the way, or why that failed."""
    name = _name(find_compiler())
    for folder in _folders(cache_dir):
        with suppress(OSError):
            if (path := _usable(folder / name)) is not None:
                return path
            if (reason := _failure(folder / name)) is not None:
                raise NotBuilt(reason)
    raise NotBuilt("the kernels are not compiled")


def _in(folder: Path, name: str, compiler: list[str], building: Callable[[], None], despite_failure: bool) -> Path:
    """Returns the library of one cache folder. Raises OSError if the folder cannot be used, and NotBuilt."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(folder)
    path = folder / name
    if (usable := _usable(path)) is not None:
        return usable
    with _locked(folder):
        if (usable := _usable(path)) is not None:  # another process has compiled it
            return usable
        if not despite_failure and (reason := _failure(path)) is not None:
            raise NotBuilt(reason)
        _tidy(folder)
        building()
        _compile(compiler, path)
    return path


def _compile(compiler: list[str], path: Path) -> None:
    """Compiles; records a failure that another try would meet too, which a full disk is not."""
    record = _record(path)
    try:
        compile_library(compiler, _target(), path)
    except NotBuilt as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            with suppress(OSError):
                record.write_text(str(error)[:_MAX_REASON_CHARS])
        raise
    record.unlink(missing_ok=True)


def _usable(path: Path) -> Path | None:
    """Returns the library if it is there and whole. Raises NotBuilt if someone else may have written it."""
    try:
        _check_ours(path)
        return path if is_whole(path) else None
    except FileNotFoundError:
        return None


def _record(path: Path) -> Path:
    """Returns the file that says why the library could not be compiled."""
    return path.with_suffix(".failed")


def _failure(path: Path) -> str | None:
    """Returns why the library could not be compiled within the last hour, by either clock."""
    try:
        age_s = time.time() - _record(path).stat().st_mtime
        return _record(path).read_text() if abs(age_s) < _AGAIN_S else None
    except FileNotFoundError:
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits for the lock on a folder. The kernel releases it when its holder ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # file systems without locks: compiling twice is only slow
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _tidy(folder: Path) -> None:
    """Removes what compilers left that were killed with their guard, and the libraries of long ago."""
    for left in folder.glob("tmp*"):
        shutil.rmtree(left, ignore_errors=True)
    newest_first = sorted(folder.glob("cpu-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in newest_first[_KEPT_LIBRARIES:]:
        old.unlink(missing_ok=True)


def _check_ours(path: Path) -> None:
    """Raises NotBuilt if another user owns the path or may write to it.

    The library runs with our rights: no one else may have written it, or may replace it.
    """
    status = path.stat()
    if status.st_uid != os.getuid():
        raise NotBuilt(f"{path} is owned by another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuilt(f"{path} is writable by other users")


def _name(compiler: list[str]) -> str:
    """Returns the file name of the library, with a hash of all that it depends on.

    Machines with different CPUs may share a cache folder. A compiler that was replaced is another one.
    """
    path = os.path.realpath(shutil.which(compiler[0]) or compiler[0])
    status = os.stat(path)
    version = f"{path} {status.st_size} {status.st_mtime_ns}"
    parts = (*ingredients(), shlex.join(compiler), version, *_target().flags, _cpu())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"cpu-{digest[:16]}.so"


def _target() -> Target:
    """Returns what to compile for: this machine, or the level that is chosen instead."""
    machine = platform.machine()
    level = chosen_level(machine, _cpu())
    return Target(machine, ("-march=native",) if level is None else level.options)


def _cpu() -> str:
    """Returns the model and features of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def _folders(cache_dir: Path | None) -> Iterator[Path]:
    """Yields the cache folders to try: the user's, then one in the temporary folder."""
    if cache_dir is not None:
        yield cache_dir
        return
    if (named := os.environ.get("XDG_CACHE_HOME")) and Path(named).is_absolute():
        yield Path(named) / "ryzanstein" / "kernels"
    else:
        with suppress(RuntimeError):  # no home directory
            yield Path.home() / ".cache" / "ryzanstein" / "kernels"
    with suppress(FileNotFoundError):  # no temporary folder
        yield Path(tempfile.gettempdir()) / f"ryzanstein-kernels-{os.getuid()}"
