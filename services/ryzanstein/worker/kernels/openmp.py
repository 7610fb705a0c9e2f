"""Gives the packaged libraries the OpenMP library that torch has loaded.

They name none as needed: a node without a compiler may have no libgomp of its own, and builds of
torch bring theirs under different file names. One OpenMP library in a process also means one team
of threads.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_NAMES = ("libgomp", "libiomp5", "libomp")
_MAPS = Path("/proc/self/maps")


def share_openmp() -> None:
    """Makes the functions of the loaded OpenMP library visible to libraries that are loaded later.

    Call it after torch was imported. If torch has loaded none, it loads the system's libgomp. Raises
    OSError if there is none.
    """
    ctypes.CDLL(next(iter(loaded_openmp()), "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)


def loaded_openmp() -> list[str]:
    """Returns the paths of the OpenMP libraries in this process."""
    paths = (line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines())
    return sorted({path for path in paths if path.rpartition("/")[2].split("-")[0].split(".")[0] in _NAMES})
