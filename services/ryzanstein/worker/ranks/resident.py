"""The resident memory of a process, as the kernel counts it (proc_pid_status(5))."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident bytes: now, and the peak since the process began.

    Pages of libraries and other mapped files count as well.
    """

    now_bytes: int
    peak_bytes: int


def resident(pid: int | str = "self") -> Resident:
    """Returns the resident memory of a process. Raises OSError when there is no such process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Resident(_bytes(fields["VmRSS"]), _bytes(fields["VmHWM"]))


def _bytes(field: str) -> int:
    return int(field.removesuffix("kB")) * 1024
