"""A real llama.cpp with a small model, as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ryzanstein.lab.chaos.machines.llama import program

PROGRAM = Path(program.__file__)
JUDGES = Path(__file__).parents[3] / "build/judges/bin/python"
START_S = 60


def python_with_llama_cpp() -> str:
    """The interpreter of the tests, else that of `bash .ci/parts judges`."""
    if find_spec("xllamacpp") is not None:
        return sys.executable
    assert JUDGES.exists(), "xllamacpp is missing: `make dev` installs it"
    return str(JUDGES)


@contextmanager
def llama_server(path: Path, log_path: Path, *, context: int = 512, slots: int = 4) -> Iterator[str]:
    """Yields the address of a server of this file; each of its slots has `context` tokens."""
    with llama_process(path, log_path, context=context, slots=slots) as (address, _):
        yield address


@contextmanager
def llama_process(
    path: Path, log_path: Path, *, context: int = 512, slots: int = 4, port: int = 0
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yields the address and the process of a server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LLAMA_"))}
    command = [python_with_llama_cpp(), str(PROGRAM), str(path), str(context), str(slots), "127.0.0.1", str(port)]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().decode().strip()
            assert address.startswith("http"), log_path.read_text()[-3000:]
            yield address, process
        finally:
            process.kill()
