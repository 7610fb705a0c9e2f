"""A real llama.cpp with a small model, as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

PROGRAM = Path(__file__).with_name("llama_program.py")
JUDGES = Path(__file__).parents[3] / "build/judges/bin/python"
START_S = 60


def python_with_llama_cpp() -> str:
    """The interpreter of the tests, else that of `bash .ci/parts judges`."""
    if find_spec("xllamacpp") is not None:
        return sys.executable
    assert JUDGES.exists(), "xllamacpp is missing: `make dev` installs it"
    return str(JUDGES)


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def convert(model: Path, folder: Path) -> Path:
    """Writes a model's directory to a GGUF file of 32-bit floats.

    Text is divided as GPT-2 does: GGUF has no name for the demo model's way. The tokens are the same.
    """
    copied = shutil.copytree(model, folder / "model")
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    (copied / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": GPT2}))
    path = folder / "model.gguf"
    command = [sys.executable, "-m", "ryzanstein.tools.convert.command", str(copied), str(path), "--type", "f32"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return path


@contextmanager
def llama_server(path: Path, log_path: Path, *, context: int = 512, slots: int = 4) -> Iterator[str]:
    """Yields the address of a server of this file; each of its slots has `context` tokens."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LLAMA_"))}
    command = [python_with_llama_cpp(), str(PROGRAM), str(path), str(context), str(slots)]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().decode().strip()
            assert address.startswith("http"), log_path.read_text()[-3000:]
            yield address
        finally:
            process.kill()
