"""The minimum duration of a step: it makes the small demo model answer for a minute.

All ranks sleep before each step, in `injection/sitecustomize.py`. A sleeping step looks like a
computing one to everything but the cores, which then have time for a whole cluster.
"""

from __future__ import annotations

from pathlib import Path


class FastPace:
    """The minimum duration of steps, at first none. Ranks read `file` before each step."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0.0)

    def environment(self) -> dict[str, str]:
        """Returns the environment for starting a node."""
        return {"RYZANSTEIN_PACE": str(self._file)}

    def set(self, step_s: float) -> None:
        """Makes each step of every node take this much longer from now on."""
        # In place, because ranks have the file mapped.
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(round(step_s * 1e6).to_bytes(8, "little"))
