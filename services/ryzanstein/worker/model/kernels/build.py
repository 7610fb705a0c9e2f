"""Compiles the kernels for this machine's CPU, once: the library stays in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import stat
from pathlib import Path

from ryzanstein.worker.model.kernels.compiling import NotBuilt, Target, compile_library, find_compiler, ingredients

__all__ = ["NotBuilt", "library"]


def library(cache_dir: Path | None = None) -> Path:
    """Returns the compiled library, from the cache if it was compiled before. Raises NotBuilt."""
    compiler, here = find_compiler(), Target(platform.machine(), ("-march=native",))
    folder = cache_dir or _cache_dir()
    path = folder / f"cpu-{_key(compiler, here)}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(folder)
        if not path.exists():
            compile_library(compiler, here, path)
        _check_ours(path)
    except OSError as error:
        raise NotBuilt(f"{folder}: {error.strerror}") from error
    return path


def _check_ours(path: Path) -> None:
    """Raises NotBuilt if another user owns the path or may write to it.

    The library runs with our rights: no one else may have written it, or may replace it.
    """
    status = path.stat()
    if status.st_uid != os.getuid():
        raise NotBuilt(f"{path} is owned by another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuilt(f"{path} is writable by other users")


def _key(compiler: list[str], target: Target) -> str:
    """Returns a hash of all that the library depends on.

    Machines with different CPUs may share a cache folder.
    """
    parts = (*ingredients(), shlex.join(compiler), *target.flags, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Returns the model and features of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def _cache_dir() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ryzanstein" / "kernels"
    except RuntimeError as error:
        raise NotBuilt("no home directory for the compiled library: set XDG_CACHE_HOME") from error
