"""How long a step of the nodes takes at least: what makes the small demo model answer for a minute.

Ranks sleep before each step, all alike, as `injection/sitecustomize.py` has it. A step that sleeps is one that computes to
everybody but the cores, which have time for a whole cluster of them.
"""

from __future__ import annotations

from pathlib import Path


class FastPace:
    """Steps take what they take at first. `file` is where ranks look before each step."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0.0)

    def environment(self) -> dict[str, str]:
        """What a node is started with."""
        return {"RYZANSTEIN_PACE": str(self._file)}

    def set(self, step_s: float) -> None:
        """Each step of every node takes so much longer from now on."""
        # In place: ranks have it mapped.
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(round(step_s * 1e6).to_bytes(8, "little"))
