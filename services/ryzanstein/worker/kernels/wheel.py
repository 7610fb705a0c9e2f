"""Compiles the libraries of a wheel, one for each level of an architecture, when the wheel is built.

Only the build hook uses it (`protos/generate.py`): it imports nothing but the standard library and
its neighbours.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from ryzanstein.worker.kernels.compilers import NotBuilt
from ryzanstein.worker.kernels.compiling import compile_library, find_compiler
from ryzanstein.worker.kernels.levels import levels_of

ARCH = "RYZANSTEIN_WHEEL_ARCH"
KERNELS = "RYZANSTEIN_WHEEL_KERNELS"
# glibc 2.17 is the first for 64-bit Arm, and older than any that runs torch.
_OLDEST_GLIBC = 17


def wanted() -> bool:
    """Returns whether the wheel shall carry libraries. Raises NotBuilt if the variable is misspelled."""
    answer = os.environ.get(KERNELS, "yes")
    if answer not in ("yes", "no"):
        raise NotBuilt(f"{KERNELS} is {answer!r}, not yes or no")
    return answer == "yes"


def compile_levels(folder: Path) -> list[Path]:
    """Compiles `<level>.so` for each level of the architecture. Raises NotBuilt."""
    levels = levels_of(_machine())
    if not levels:
        raise NotBuilt(f"there are no kernels for {_machine()}")
    compiler = find_compiler()
    paths = [folder / f"{level.name}.so" for level in levels]
    for level, path in zip(levels, paths, strict=True):
        compile_library(compiler, level.target, path)
        path.chmod(0o755)
    return paths


def tag(libraries: Iterable[Path]) -> str:
    """Returns the wheel's tag: any Python 3, and a glibc that has every function the libraries use (PEP 600).

    They need libc and libm alone, and no Python of any version.
    """
    found = (re.findall(rb"\bGLIBC_2\.(\d+)", path.read_bytes()) for path in libraries)
    newest = max((int(minor) for minors in found for minor in minors), default=0)
    return f"py3-none-manylinux_2_{max(newest, _OLDEST_GLIBC)}_{_machine()}"


def _machine() -> str:
    return os.environ.get(ARCH) or platform.machine()
