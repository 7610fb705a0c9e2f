"""Generates the `ryzanstein.v1` stubs when the client is built or installed, of which they are a part.

It is a hatchling build hook; `make protos` runs it. The stubs are not committed. They are generated with grpcio-tools 1.81,
whose code loads on protobuf runtimes 6 and 7.
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
TARGET = ROOT / "clients" / "python"


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


class StubsHook(BuildHookInterface[Any]):
    """Runs `generate` whenever the client is built or installed."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate()


if __name__ == "__main__":
    generate()
