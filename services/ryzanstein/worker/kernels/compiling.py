"""Runs a C compiler on the sources of the kernels: for this machine (`build`) or for a level (`wheel`).

It needs GCC 12, clang 15 or later. It takes some seconds. It imports nothing of ours: builds of the
wheel load it without the project's dependencies.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.worker.kernels.compilers import NotBuilt, compilers

__all__ = ["NotBuilt", "Target", "compile_library", "find_compiler", "ingredients", "is_whole"]

# Attention is a tenth faster with -O3. Products are not, and would take three times as long to
# compile. What takes longest is begun first.
_FAST, _FASTEST = "-O2", "-O3"
_OPTIMIZATION = {
    "blocks.c": _FAST,
    "attention.c": _FASTEST,
    "attention_seal.c": _FASTEST,
    "rows.c": _FAST,
    "delta.c": _FASTEST,
    "mamba.c": _FASTEST,
    "tails.c": _FASTEST,
    "floats.c": _FAST,
    "adapters.c": _FAST,
    "int8.c": _FAST,
    "block_rows.c": _FAST,
    "draw.c": _FASTEST,
    "step.c": _FAST,
    "meeting.c": _FASTEST,
}
_SOURCES = tuple(Path(__file__).with_name(name) for name in _OPTIMIZATION)
_HEADER_NAMES = (
    *("lanes.h", "ints.h", "levels.h", "block_types.h", "panels.h", "floats.h", "hadamard.h", "slots.h"),
    *("attention_pages.h", "attention_rows.h", "attention_hot.h", "attention_cold.h", "attention_tiles.h"),
    *("attention_sparse.h", "attention_parts.h", "attention_team.h", "team.h", "step.h", "meeting.h", "adapters.h"),
)
_HEADERS = tuple(Path(__file__).with_name(name) for name in _HEADER_NAMES)
# Sums keep the source's order, and products its rounding: the compiler must not change any bits.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c11", *_ARITHMETIC, "-fopenmp", "-fPIC")
_WIDE = "-mprefer-vector-width=512"
_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size


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
    """Writes the library, whole or not at all; see `is_whole`. Uses all cores of this process.

    Raises NotBuilt and OSError.
    """
    with compilers(path.parent) as running:
        out, objects = running.folder / path.name, [running.folder / f"{source.stem}.o" for source in _SOURCES]
        commands = [
            [*compiler, *target.flags, _OPTIMIZATION[source.name], "-c", str(source), "-o", str(compiled)]
            for source, compiled in zip(_SOURCES, objects, strict=True)
        ]
        running.run_all(commands)
        openmp = ["-fopenmp"] if target.openmp else []
        running.run([*compiler, "-shared", *openmp, *map(str, objects), "-o", str(out), "-lm"])
        out.chmod(0o700)
        _seal(out)
        out.replace(path)
    _sync(path.parent)


def is_whole(path: Path) -> bool:
    """Returns whether a library is as it was written: a full disk or a power cut may have shortened it.

    Its last bytes are a digest of the others, which the loader ignores.
    """
    content = path.read_bytes()
    return _DIGEST(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _seal(path: Path) -> None:
    """Appends the digest and writes the file through to the disk."""
    digest = _DIGEST(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Writes the folder's entries through to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
