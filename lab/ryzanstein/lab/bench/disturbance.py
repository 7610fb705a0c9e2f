"""What else ran on this process's cores while a benchmark measured."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

_FOREIGN_CORES, _STOLEN_CORES = 0.1, 0.05
_BUSY = ("user", "nice", "system", "irq", "softirq")  # `user` has the time of guests


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Cores, on average: those that processes of others used, and those that the hypervisor gave to other machines.

    What this process and its descendants used is taken away. Times are counted in hundredths of a second, and those of
    a descendant that nobody waited for are lost: they count as another's.
    """

    cores: int
    foreign_cores: float
    stolen_cores: float

    @property
    def is_quiet(self) -> bool:
        return self.foreign_cores < _FOREIGN_CORES and self.stolen_cores < _STOLEN_CORES

    def __str__(self) -> str:
        if self.is_quiet:
            return f"the machine was quiet: others used {self.foreign_cores:.2f} of {self.cores} cores"
        used = f"others used {self.foreign_cores:.2f} of {self.cores} cores, the hypervisor took {self.stolen_cores:.2f}"
        return f"THE MACHINE WAS DISTURBED: {used}; measure again where ratios matter"

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"quiet": self.is_quiet}


class Watch:
    """A watch over the cores, from its start to `stop`."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._began_s = time.monotonic()
        self._before = self._read()

    def stop(self) -> Disturbance:
        """Returns what was seen so far."""
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        busy_s, stolen_s, own_s = (now - before for now, before in zip(self._read(), self._before, strict=True))
        return Disturbance(len(self._cores), max(0.0, busy_s - own_s) / elapsed_s, max(0.0, stolen_s) / elapsed_s)

    def _read(self) -> tuple[float, float, float]:
        """Returns seconds: busy, stolen, and of this process with all that it started."""
        times = psutil.cpu_times(percpu=True)
        cores = [times[core] for core in self._cores if core < len(times)]
        busy_s = sum(getattr(core, name, 0.0) for core in cores for name in _BUSY)
        return busy_s, sum(getattr(core, "steal", 0.0) for core in cores), _own_s()


def _own_s() -> float:
    this = psutil.Process()
    return sum(_process_s(process) for process in (this, *this.children(recursive=True)))


def _process_s(process: psutil.Process) -> float:
    """Returns what a process used, with its children that it has waited for."""
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has ended meanwhile
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
