"""The machine that figures were measured on."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

from ryzanstein.process.allotment import memory_bytes, whole_cores


def machine() -> dict[str, Any]:
    """Returns the machine that the figures were measured on."""
    return {
        "cpu": cpu(),
        "cores": whole_cores(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def cpu() -> str:
    """Returns the name of the processor."""
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
