"""What is generated when the project is built: the `ryzanstein.v1` stubs, and the kernels that a wheel carries.

It is a hatchling build hook; `make protos` generates the stubs alone. Nothing that it makes is committed. Stubs are generated
with grpcio-tools 1.81, whose code loads on protobuf runtimes 6 and 7.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "shared"
KERNELS = "ryzanstein/worker/kernels/lib"  # in the wheel: none lie in a source tree


def generate(target: Path = TARGET) -> None:
    """Writes `ryzanstein/v1/*_pb2.py`, `*_pb2_grpc.py` and their exact `.pyi` below `target`.

    The files are made in a temporary folder and moved into place one by one, so that a process that imports them at that
    moment never sees a torn file.
    """
    import grpc_tools
    from grpc_tools import protoc

    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory(dir=target) as made:
        well_known = Path(grpc_tools.__file__).parent / "_proto"
        out = [f"--{kind}_out={made}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        os.environ["PATH"] = path
        if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *out, *files]) != 0:
            raise SystemExit("protoc failed; its message stands above")
        for source in Path(made).rglob("*.py*"):
            destination = target / source.relative_to(made)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination.with_suffix(destination.suffix + ".new"))
            destination.with_suffix(destination.suffix + ".new").replace(destination)


def add_kernels(build_data: dict[str, Any], folder: Path) -> None:
    """Compiles the kernels of every level into a folder, and makes them part of a wheel for their platform alone."""
    sys.path[:0] = [str(ROOT / "services"), str(ROOT / "shared")]
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


class BuildHook(BuildHookInterface[Any]):
    """Runs `generate` whenever the project is built or installed, and `add_kernels` for wheels, not for editable installs."""

    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate()
        if self.target_name == "wheel" and version == "standard":
            self._folder = tempfile.TemporaryDirectory()
            add_kernels(build_data, Path(self._folder.name))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()


if __name__ == "__main__":
    generate()
