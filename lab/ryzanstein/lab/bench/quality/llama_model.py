"""llama.cpp as a model whose logits are wanted: a process that shares memory with this one."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ryzanstein import errors
from ryzanstein.lab.bench.quality.models import ModelRoom, Times

_PROGRAM = Path(__file__).with_name("llama_program.py")
_END_S = 10.0
_NAMES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")


class LlamaFailed(Exception):
    """llama.cpp refused the file or ended. The message is its own."""


class LlamaModel:
    """One GGUF file under llama.cpp. It is a process until `close`."""

    def __init__(self, python: Path, path: Path, room: ModelRoom) -> None:
        """Raises LlamaFailed."""
        self._shared_fd = os.memfd_create("logits")
        try:
            self._process = _start(python, path, room, self._shared_fd)
        except OSError as error:
            os.close(self._shared_fd)
            raise LlamaFailed(f"{python}: {error.strerror}") from error
        self._shared: mmap.mmap | None = None
        self._fresh = True
        try:
            facts = self._answer()
        except LlamaFailed:
            self.close()
            raise
        self.vocab_size: int = facts["vocab_size"]
        self.memory_bytes: int = facts["memory_bytes"]

    def restart(self) -> None:
        self._fresh = True

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        self._ask({"do": "advance", "ids": list(token_ids), "restart": self._fresh})
        self._fresh = False
        if self._shared is None:
            self._shared = mmap.mmap(self._shared_fd, 0)
        numbers = torch.frombuffer(self._shared, dtype=torch.float32, count=len(token_ids) * self.vocab_size)
        return numbers.view(len(token_ids), self.vocab_size)

    def time(self, prompt_ids: Sequence[int], new_tokens: int) -> Times:
        self._fresh = True
        return Times(*self._ask({"do": "time", "ids": list(prompt_ids), "new_tokens": new_tokens}))

    def close(self) -> None:
        """Ends the process: closing its input asks for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._shared_fd)

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its last answer says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()["answer"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LlamaFailed(f"llama.cpp ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LlamaFailed(answer["error"])
        return answer


def find_llama(directory: Path) -> Path:
    """Returns the Python of the environment that has llama.cpp. Raises INVALID_ARGUMENT if there is none."""
    python = directory / "bin" / "python"
    if not python.exists():
        raise errors.invalid("judges", f"{python} is missing; `bash .ci/parts judges` installs llama.cpp into build/judges")
    return python


def _start(python: Path, path: Path, room: ModelRoom, shared_fd: int) -> subprocess.Popen[str]:
    settings = {
        "path": str(path),
        "max_tokens": room.max_tokens,
        "at_once": room.at_once,
        "threads": room.threads,
        "shared_fd": shared_fd,
    }
    environment = {key: value for key, value in os.environ.items() if key not in _NAMES}
    return subprocess.Popen(
        [str(python), str(_PROGRAM), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment | {"OMP_NUM_THREADS": str(room.threads)},
        pass_fds=[shared_fd],
    )
