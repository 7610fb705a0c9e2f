"""An inference server of others: llama.cpp's, with the demo model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from ryzanstein.addresses import join_address
from ryzanstein.cli.processes.host import Host
from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.machines.child import Child, wait_listening
from ryzanstein.lab.chaos.machines.llama import program

_CONTEXT, _SLOTS = 1024, 4
_CONVERT_S = 60.0
_RULE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def llama_file(directory: Path) -> Path:
    """Writes the demo model to a GGUF file in the directory. Raises ServiceFailedError.

    GGUF has no name for the rule by which the demo's tokenizer divides a text. Nodes tokenize, so the file says another.
    """
    parts, path = directory / "parts", directory / "demo.gguf"
    shutil.copytree(MODEL_DIR, parts, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tokenizer = json.loads((parts / "tokenizer.json").read_text())
    (parts / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": _RULE}))
    command = (sys.executable, "-P", "-m", "ryzanstein.tools.convert.command", str(parts), str(path), "--type", "f32")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_S, check=False)
    if done.returncode:
        raise ServiceFailedError(f"the model cannot be written for llama.cpp: {done.stderr[-500:]}")
    return path


class LlamaServer:
    """A server on a host. `kill` sends SIGKILL; `start` brings it back at the same address."""

    def __init__(self, host: Host, path: Path, log: Path, port: int, python: str = sys.executable) -> None:
        self._address, self._port = host.address, port
        numbers = (str(_CONTEXT), str(_SLOTS), host.address, str(port))
        self._child = Child((python, program.__file__, str(path), *numbers), host, log)

    @property
    def url(self) -> str:
        return f"http://{join_address(self._address, self._port)}"

    @property
    def pid(self) -> int | None:
        """The process id, or None if it does not run."""
        return self._child.pid

    def start(self) -> None:
        """Starts the server, unless it runs, and returns when it listens."""
        if not self._child.running:
            self._child.kill()
            self._child.start()
            wait_listening(self._address, self._port, 30.0)

    def kill(self) -> None:
        self._child.kill()
