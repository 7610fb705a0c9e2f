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


def private_bytes(pid: int | str = "self") -> int:
    """Returns the memory that is not backed by files: what a machine needs room for.

    Pages that a rank shares with its fork server until either writes to them count for both.
    Raises OSError when there is no such process.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(_bytes(fields.get(name, "0 kB")) for name in ("RssAnon", "RssShmem"))  # a zombie has none


def _bytes(field: str) -> int:
    return int(field.removesuffix("kB")) * 1024
