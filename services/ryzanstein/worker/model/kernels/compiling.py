"""Runs a C compiler on the sources of the kernels: for this machine (`build`) or for a level (`wheel`).

It needs GCC 12, clang 15 or later. It takes some seconds. It imports nothing of ours: builds of the
wheel load it without the project's dependencies.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Attention is a tenth faster with -O3. Products are not, and would take three times as long to
# compile. What takes longest is begun first.
_FAST, _FASTEST = "-O2", "-O3"
_OPTIMIZATION = {
    "blocks.c": _FAST,
    "attention.c": _FASTEST,
    "attention_seal.c": _FASTEST,
    "rows.c": _FAST,
    "floats.c": _FAST,
    "int8.c": _FAST,
    "block_rows.c": _FAST,
    "draw.c": _FASTEST,
}
_SOURCES = tuple(Path(__file__).with_name(name) for name in _OPTIMIZATION)
_HEADER_NAMES = (
    *("lanes.h", "ints.h", "levels.h", "block_types.h", "panels.h", "floats.h", "hadamard.h"),
    *("attention_pages.h", "attention_rows.h", "attention_hot.h", "attention_cold.h"),
    *("attention_sparse.h", "attention_parts.h"),
)
_HEADERS = tuple(Path(__file__).with_name(name) for name in _HEADER_NAMES)
# Sums keep the source's order, and products its rounding: the compiler must not change any bits.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c11", *_ARITHMETIC, "-fopenmp", "-fPIC")
_WIDE = "-mprefer-vector-width=512"
_TIMEOUT_S = 120.0


class NotBuilt(Exception):
    """There is no library: no compiler, it failed, or none is packaged for this CPU."""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine to compile for: its name as `platform.machine()` gives it, and options of the compiler.

    `openmp`: whether the library names the compiler's OpenMP library as one that it needs.
    """

    machine: str
    options: tuple[str, ...]
    openmp: bool = True

    @property
    def flags(self) -> tuple[str, ...]:
        """The options for every source."""
        wide = (_WIDE,) if self.machine in ("x86_64", "AMD64") else ()
        return (*_FLAGS, *wide, *self.options)


def find_compiler() -> list[str]:
    """Returns the compiler's command, with the options that CC may contain. Raises NotBuilt."""
    named = os.environ.get("CC", "cc")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise NotBuilt(f"CC {named!r}: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise NotBuilt(f"no C compiler {named!r}: install one or set CC")
    return command


def ingredients() -> tuple[str, ...]:
    """Returns the text of all sources and the optimization of each."""
    return (*(path.read_text() for path in (*_SOURCES, *_HEADERS)), *_OPTIMIZATION.values())


def compile_library(compiler: Sequence[str], target: Target, path: Path) -> None:
    """Writes the library. Several processes may do so at once: each renames a file of its own.

    Raises NotBuilt and OSError.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out, objects = Path(folder) / path.name, [Path(folder) / f"{source.stem}.o" for source in _SOURCES]
        commands = [
            [*compiler, *target.flags, _OPTIMIZATION[source.name], "-c", str(source), "-o", str(compiled)]
            for source, compiled in zip(_SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        openmp = ["-fopenmp"] if target.openmp else []
        _run([*compiler, "-shared", *openmp, *map(str, objects), "-o", str(out), "-lm"])
        out.chmod(0o700)
        out.rename(path)


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
