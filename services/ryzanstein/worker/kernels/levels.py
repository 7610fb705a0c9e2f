"""The kinds of CPU that a packaged library exists for, and which of them this CPU is.

A level is what the compilers call a micro-architecture level: a set of instructions that every CPU of
the level has. The psABI of x86-64 defines v3 and v4
(https://gitlab.com/x86-psABIs/x86-64-ABI, "micro-architecture levels").
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ryzanstein.worker.kernels.compilers import NotBuilt
from ryzanstein.worker.kernels.compiling import Target


@dataclass(frozen=True, slots=True)
class ProcessorLevel:
    """`features` are those of /proc/cpuinfo that the compiler's options allow it to use."""

    name: str
    machine: str
    options: tuple[str, ...]
    features: frozenset[str]

    @property
    def target(self) -> Target:
        """What to compile for. The OpenMP library is the one that torch brings (`openmp`)."""
        return Target(self.machine, self.options, openmp=False)


# The kernel's names differ from the compilers': abm is LZCNT, lahf_lm LAHF-SAHF, cx16 CMPXCHG16B.
_X86_64_V3 = frozenset(
    "cx16 lahf_lm popcnt ssse3 sse4_1 sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe".split()  # noqa: SIM905 - as the kernel does
)
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

LEVEL = "RYZANSTEIN_KERNELS_LEVEL"

# The best of each machine first. VNNI multiplies 8-bit weights (`int8.c`).
LEVELS = (
    ProcessorLevel("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _X86_64_V4 | {"avx512_vnni"}),
    ProcessorLevel("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _X86_64_V4),
    ProcessorLevel("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _X86_64_V3 | {"avx_vnni"}),
    ProcessorLevel("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _X86_64_V3),
    ProcessorLevel("aarch64", "aarch64", ("-march=armv8-a",), frozenset({"fp", "asimd"})),
)


def levels_of(machine: str) -> tuple[ProcessorLevel, ...]:
    """Returns the levels of a machine's architecture, as `platform.machine()` names it, best first."""
    return tuple(level for level in LEVELS if level.machine == machine)


def chosen_level(machine: str, cpuinfo: str) -> ProcessorLevel | None:
    """Returns the level named by RYZANSTEIN_KERNELS_LEVEL, None if it names none: for measurements of lower levels.

    Raises NotBuilt if the machine has no such level, or the CPU lacks something of it.
    """
    if not (name := os.environ.get(LEVEL)):
        return None
    levels = levels_of(machine)
    chosen = next((level for level in levels if level.name == name), None)
    if chosen is None:
        raise NotBuilt(f"{LEVEL} is {name!r}, not one of {', '.join(level.name for level in levels)}")
    if lacking := chosen.features - _features(cpuinfo):
        raise NotBuilt(f"the CPU lacks {', '.join(sorted(lacking))} of {name}")
    return chosen


def best_level(machine: str, cpuinfo: str) -> ProcessorLevel:
    """Returns the best level that a CPU has, by the text of its /proc/cpuinfo.

    Raises NotBuilt, which names what the CPU lacks.
    """
    levels, features = levels_of(machine), _features(cpuinfo)
    if not levels:
        raise NotBuilt(f"no packaged library is for {machine or 'this machine'}")
    fitting = next((level for level in levels if level.features <= features), None)
    if fitting is None:
        lowest = levels[-1]
        raise NotBuilt(f"the CPU lacks {', '.join(sorted(lowest.features - features))} of {lowest.name}")
    return fitting


def _features(cpuinfo: str) -> frozenset[str]:
    """Returns the features that all processors have."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    each = [frozenset(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features")]
    return frozenset.intersection(*each) if each else frozenset()
