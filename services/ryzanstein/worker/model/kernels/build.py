"""Compiles the kernels for this machine's CPU, once: the library stays in the user's cache folder.

It needs a C compiler, `cc` or the one in the variable CC: GCC 12, clang 15 or later. It takes some
seconds.
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

# Attention is a tenth faster with -O3. Products are not, and would take three times as long to
# compile.
_LEVELS = {"rows.c": "-O2", "attention.c": "-O3", "floats.c": "-O2", "int8.c": "-O2", "draw.c": "-O3"}
_SOURCES = tuple(Path(__file__).with_name(name) for name in _LEVELS)
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("lanes.h", "panels.h", "floats.h"))
# Sums keep the source's order, and products its rounding: the compiler must not change any bits.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c11", "-march=native", *_ARITHMETIC, "-fopenmp", "-fPIC")
_WIDE = "-mprefer-vector-width=512"
_TIMEOUT_S = 60.0


class NotBuilt(Exception):
    """There is no compiler, it failed, or the library cannot be written."""


def library(cache_dir: Path | None = None) -> Path:
    """Returns the compiled library, from the cache if it was compiled before. Raises NotBuilt."""
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
    """Returns the compiler's command, with the options that CC may contain."""
    named = os.environ.get("CC", "cc")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise NotBuilt(f"CC {named!r}: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise NotBuilt(f"no C compiler {named!r}: install one or set CC")
    return command


def _check_ours(path: Path) -> None:
    """Raises NotBuilt if another user owns the path or may write to it.

    The library runs with our rights: no one else may have written it, or may replace it.
    """
    status = path.stat()
    if status.st_uid != os.getuid():
        raise NotBuilt(f"{path} is owned by another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuilt(f"{path} is writable by other users")


def _compile(compiler: list[str], target: Path) -> None:
    """Compiles the library. Several ranks may do so at once: each renames a file of its own."""
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
        raise NotBuilt(f"{command[0]} timed out after {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise NotBuilt(f"{command[0]}: {_complaint(done.stderr)}")


def _complaint(stderr: str) -> str:
    """Returns the first error of a compiler or linker, or the last line if there is none."""
    lines = stderr.strip().splitlines() or ["failed"]
    return next((line for line in lines if "error: " in line or "cannot find" in line), lines[-1])


def _key(compiler: list[str]) -> str:
    """Returns a hash of all that the library depends on.

    Machines with different CPUs may share a cache folder.
    """
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
    """Returns the model and features of the CPU."""
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
        raise NotBuilt("no home directory for the compiled library: set XDG_CACHE_HOME") from error
