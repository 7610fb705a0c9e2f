"""What the figures depend on: the processor, its fast instructions, and the usable cores."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ryzanstein.process.allotment import memory_bytes

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16")


@dataclass(frozen=True, slots=True)
class PeerMachine:
    cpu: str
    cores: tuple[int, ...]
    memory_bytes: int
    flags: tuple[str, ...]

    @classmethod
    def read(cls) -> Self:
        """Returns the machine's facts from /proc/cpuinfo.

        A processor whose file has other field names is known by platform alone.
        """
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        present = set(facts.get("flags", "").split())
        return cls(
            facts.get("model name", platform.machine()),
            tuple(sorted(os.sched_getaffinity(0))),
            memory_bytes(),
            tuple(flag for flag in _FLAGS if flag in present),
        )
