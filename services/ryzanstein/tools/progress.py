"""Reports on a conversion: bytes done of all, on one line of a terminal, every tenth otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TextIO


@dataclass(slots=True)
class ConversionProgress:
    """What has been written of `total_bytes`. Notes are printed as they come."""

    total_bytes: int
    out: TextIO
    _done: int = 0
    _reported: int = -1
    _noted: set[str] = field(default_factory=set)

    def add(self, num_bytes: int, name: str) -> None:
        """Counts bytes of a tensor."""
        self._done += num_bytes
        percent = 100 * self._done // max(1, self.total_bytes)
        step = 1 if self.out.isatty() else 10
        if percent // step == self._reported:
            return
        self._reported = percent // step
        if self.out.isatty():
            self.out.write(f"\r{percent:3d} % {name[:60]:60}" + ("\n" if self._done >= self.total_bytes else ""))
        else:
            self.out.write(f"{percent} %: {self._done} of {self.total_bytes} bytes\n")
        self.out.flush()

    def note(self, line: str) -> None:
        """Prints a line, once."""
        if line not in self._noted:
            self._noted.add(line)
            self.out.write(f"{line}\n")
            self.out.flush()
