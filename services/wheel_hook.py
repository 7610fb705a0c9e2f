"""Compiles the kernels that a wheel carries, when it is built: a hatchling build hook."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "ryzanstein/worker/kernels/lib"  # in the wheel: none lie in a source tree


def add_kernels(build_data: dict[str, Any], folder: Path) -> None:
    """Compiles the kernels of every level into a folder, and makes them part of a wheel for their platform alone."""
    sys.path[:0] = [str(ROOT / "services"), str(ROOT / "shared"), str(ROOT / "clients" / "python")]
    from ryzanstein.worker.kernels import wheel
    from ryzanstein.worker.kernels.compilers import NotBuilt

    try:
        if not wheel.wanted():
            return
        libraries = wheel.compile_levels(folder)
    except NotBuilt as error:
        raise SystemExit(f"no kernels for the wheel: {error}. For a wheel without them set {wheel.KERNELS}=no.") from error
    build_data["force_include"] |= {str(path): f"{KERNELS}/{path.name}" for path in libraries}
    build_data["pure_python"] = False
    build_data["tag"] = wheel.tag(libraries)


class KernelsHook(BuildHookInterface[Any]):
    """Runs `add_kernels` for wheels, not for editable installs."""

    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel" and version == "standard":
            self._folder = tempfile.TemporaryDirectory()
            add_kernels(build_data, Path(self._folder.name))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()
