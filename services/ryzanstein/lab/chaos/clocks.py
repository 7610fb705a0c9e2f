"""A wall clock of its own for each service; monotonic time stays the machine's.

By a preloaded library of a few lines (`injection/wall_clock.c`) and not by libfaketime, whose lock around every look at the
clock stops services for seconds on busy cores: nodes were suspected as often when their clocks did not jump at all.
"""

from __future__ import annotations

from pathlib import Path

from ryzanstein.lab.chaos.preloaded import built


class Clocks:
    """One file per service says how far its clock is off. NetworkImpossibleError: there is no C compiler."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._library = built("wall_clock.c", directory)

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
