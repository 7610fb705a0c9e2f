"""A separate wall clock for each service; monotonic time stays the machine's.

It uses a small preloaded library (`injection/wall_clock.c`), not libfaketime. libfaketime takes a
lock for each clock read, which stops services for seconds on busy cores: nodes were suspected as
often when their clocks did not jump at all.
"""

from __future__ import annotations

from pathlib import Path

from ryzanstein.lab.chaos.machines.preloaded import built


class Clocks:
    """The clocks. One file per service holds its clock's offset.

    Raises NetworkImpossibleError if there is no C compiler.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._library = built("wall_clock.c", directory)

    def environment(self, name: str) -> dict[str, str]:
        """Returns the environment for starting a service with this clock."""
        self.turn(name, 0)
        return {"LD_PRELOAD": str(self._library), "RYZANSTEIN_WALL_CLOCK": str(self._file(name))}

    def turn(self, name: str, offset_s: int) -> None:
        """Sets how far ahead (or behind) the service's clock is from now on."""
        file = self._file(name)
        # In place, because the service has the file mapped.
        with file.open("r+b" if file.exists() else "wb") as clock:
            clock.write(offset_s.to_bytes(8, "little", signed=True))

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.clock"
