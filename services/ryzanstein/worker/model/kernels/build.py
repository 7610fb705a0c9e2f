"""Compiles the kernels for this machine's CPU, once: the library is kept in the user's cache folder.

Needs a C compiler, `cc` or what the variable CC names: GCC 12, clang 15 or later. It takes some seconds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

# Attention is a tenth faster with -O3; products are not, and would take three times as long to compile.
_LEVELS = {"rows.c": "-O2", "attention.c": "-O3", "floats.c": "-O2", "int8.c": "-O2", "draw.c": "-O3"}
_SOURCES = tuple(Path(__file__).with_name(name) for name in _LEVELS)
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("lanes.h", "panels.h", "floats.h"))
# Sums are in the order, and products rounded, as the source says: bits must not be the compiler's choice.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c11", "-march=native", *_ARITHMETIC, "-fopenmp", "-fPIC")
_WIDE = "-mprefer-vector-width=512"
_TIMEOUT_S = 60.0


class NotBuilt(Exception):
    """There is no compiler, it failed, or nothing can be written."""


def library(cache_dir: Path | None = None) -> Path:
    """The compiled library, from the cache where it has been compiled before. Raises NotBuilt."""
    compiler = _compiler()
    folder = cache_dir or _cache_dir()
    target = folder / f"cpu-{_key(compiler)}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(folder)
        if not target.exists():
            _compile(compiler, target)
        _check_ours(target)
    except OSError as error:
        raise NotBuilt(f"{folder}: {error.strerror}") from error
    return target


def _compiler() -> list[str]:
    """The command, with the options that CC may hold."""
    named = os.environ.get("CC", "cc")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise NotBuilt(f"CC {named!r}: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise NotBuilt(f"there is no C compiler {named!r}: install one or set CC")
    return command


def _check_ours(path: Path) -> None:
    """What is loaded runs with our rights: nobody else may have written it, or may put another one in its place."""
    status = path.stat()
    if status.st_uid != os.getuid():
        raise NotBuilt(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuilt(f"{path} may be written by other users")


def _compile(compiler: list[str], target: Path) -> None:
    """Several ranks may do so at once: each writes a file of its own and renames it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        out, objects = Path(folder) / target.name, [Path(folder) / f"{source.stem}.o" for source in _SOURCES]
        for source, compiled in zip(_SOURCES, objects, strict=True):
            _run(
                [
                    *compiler,
                    *_FLAGS,
                    *([_WIDE] if _is_x86() else []),
                    _LEVELS[source.name],
                    "-c",
                    str(source),
                    "-o",
                    str(compiled),
                ]
            )
        _run([*compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(out), "-lm"])
        out.chmod(0o700)
        out.rename(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"{command[0]} took longer than {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise NotBuilt(f"{command[0]}: {_complaint(done.stderr)}")


def _complaint(stderr: str) -> str:
    """The first error of a compiler or linker, or the last line where none says so."""
    lines = stderr.strip().splitlines() or ["failed"]
    return next((line for line in lines if "error: " in line or "cannot find" in line), lines[-1])


def _key(compiler: list[str]) -> str:
    """What the library depends on. A cache folder may be shared by machines with different CPUs."""
    parts = (
        *(path.read_text() for path in (*_SOURCES, *_HEADERS)),
        shlex.join(compiler),
        _WIDE,
        *_FLAGS,
        *_LEVELS.values(),
        _cpu(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Model and features of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _cache_dir() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ryzanstein" / "kernels"
    except RuntimeError as error:
        raise NotBuilt("there is no home folder to keep the library in: set XDG_CACHE_HOME") from error
