"""A wall clock of its own for each service; monotonic time stays the machine's.

By a preloaded library of a few lines (`injection/wall_clock.c`) and not by libfaketime, whose lock around every look at the
clock stops services for seconds on busy cores: nodes were suspected as often when their clocks did not jump at all.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from ryzanstein.chaos.network import NetworkImpossibleError, program

_SOURCE = Path(__file__).parent / "injection" / "wall_clock.c"


class Clocks:
    """One file per service says how far its clock is off. NetworkImpossibleError: there is no C compiler."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._library = directory / "wall_clock.so"
        command = (program("cc"), "-O2", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE), "-ldl")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise NetworkImpossibleError(f"cc: {done.stderr.strip()}")

    def environment(self, name: str) -> dict[str, str]:
        """What a service with this clock is started with."""
        self.turn(name, 0)
        return {"LD_PRELOAD": str(self._library), "RYZANSTEIN_WALL_CLOCK": str(self._file(name))}

    def turn(self, name: str, offset_s: int) -> None:
        """The service's clock is so far ahead (or behind) from now on."""
        file = self._file(name)
        # In place: the service has it mapped.
        with file.open("r+b" if file.exists() else "wb") as clock:
            clock.write(offset_s.to_bytes(8, "little", signed=True))

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.clock"
