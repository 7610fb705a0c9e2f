"""What a measurement was made on: the facts that a comparison must know."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import msgspec
import torch

from ryzanstein.lab.bench.engine.reference import num_cores
from ryzanstein.process.allotment import memory_bytes

_TELLING = ("avx", "amx", "fma", "sse4", "f16c", "asimd", "sve", "i8mm", "bf16", "neon")
_GIT_S = 5.0


class SuiteMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of a measurement.

    `cores` are those this process may use; `flags` are the CPU's vector extensions; `commit` ends
    in "+" if the sources differ from it, and is empty outside a git checkout.
    """

    host: str
    cpu: str
    cores: int
    flags: list[str]
    memory_bytes: int
    system: str
    python: str
    torch: str
    commit: str

    @classmethod
    def here(cls) -> SuiteMachine:
        cpu, flags = _cpu()
        return cls(
            host=platform.node(),
            cpu=cpu,
            cores=num_cores(),
            flags=flags,
            memory_bytes=memory_bytes(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            torch=str(torch.__version__),
            commit=_commit(),
        )


def _cpu() -> tuple[str, list[str]]:
    """Returns the first core's model and flags from proc(5).

    On x86 the fields are `model name` and `flags`, on ARM `CPU part` and `Features`.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    model = fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', 'unknown')}"
    stepping = " ".join(f"{name} {fields[name]}" for name in ("cpu family", "model", "stepping") if name in fields)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return f"{model} {stepping}".strip(), sorted(flag for flag in flags if flag.startswith(_TELLING))


def _commit() -> str:
    commit = _git("rev-parse", "HEAD")
    return commit + "+" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str:
    """Returns git's output about the running sources, or an empty string."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
