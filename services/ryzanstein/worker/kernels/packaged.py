"""Finds the library that the wheel carries for this CPU's level. No compiler is needed."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.worker.kernels.compilers import NotBuilt
from ryzanstein.worker.kernels.levels import ProcessorLevel, best_level, chosen_level

FOLDER = Path(__file__).with_name("lib")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class PackagedLibrary:
    """A library of the wheel and the level that it was compiled for."""

    path: Path
    level: ProcessorLevel


def packaged_library(folder: Path | None = None) -> PackagedLibrary:
    """Returns the library of the level that is chosen, or the best one that this CPU has. Raises NotBuilt.

    `folder` None: that of the installation.
    """
    folder = folder or FOLDER
    if not folder.is_dir():
        raise NotBuilt("no libraries are packaged with this installation")
    machine, cpuinfo = platform.machine(), _cpuinfo()
    level = chosen_level(machine, cpuinfo) or best_level(machine, cpuinfo)
    path = folder / f"{level.name}.so"
    if not path.is_file():
        raise NotBuilt(f"no library for {level.name} is packaged with this installation")
    return PackagedLibrary(path, level)


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text()
    except OSError as error:
        raise NotBuilt(f"{_CPUINFO}: {error.strerror}") from error
