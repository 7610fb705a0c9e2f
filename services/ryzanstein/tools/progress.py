"""Reports on what takes long: bytes of a conversion, steps of a training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

_SECONDS = 10.0  # between lines that are not on a terminal


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


@dataclass(slots=True)
class ReadingProgress:
    """Reports on a file that is read, once it has taken long."""

    name: str
    out: TextIO
    clock: Callable[[], float] = time.monotonic
    _shown: float | None = None

    def __call__(self, number: int) -> None:
        """Tells of a line that is read, every ten seconds."""
        now = self.clock()
        if self._shown is None:
            self._shown = now
        if now - self._shown >= _SECONDS:
            self._shown = now
            self.out.write(f"{self.name}: {number} lines read\n")
            self.out.flush()


@dataclass(slots=True)
class TrainingProgress:
    """Reports on a training: the tokens that each step reads, `tokens`, give speed and the time that is left."""

    tokens: Sequence[int]
    out: TextIO
    clock: Callable[[], float] = time.monotonic
    _begun: tuple[int, float] | None = None
    _shown: float = -math.inf

    def step(self, step: int, loss: float, learning_rate: float) -> None:
        """Tells of a step that is done, from 1: on one line of a terminal, every ten seconds otherwise."""
        now = self.clock()
        if self._begun is None:
            self._begun = step, now
            return
        first, begun = self._begun
        last = step == len(self.tokens)
        if not last and now - self._shown < (0.2 if self.out.isatty() else _SECONDS):
            return
        self._shown = now
        speed = sum(self.tokens[first:step]) / max(now - begun, 1e-9)
        left = sum(self.tokens[step:]) / max(speed, 1e-9)
        place = f"step {step}/{len(self.tokens)}  {speed:.0f} tokens/s"
        line = f"{place}  loss {loss:.4f}  lr {learning_rate:.2e}  {duration(left)} left"
        self.out.write(f"\r{line:90}" + ("\n" if last else "") if self.out.isatty() else f"{line}\n")
        self.out.flush()

    def validated(self, step: int, loss: float) -> None:
        """Tells of a validation after a step."""
        begin = "\n" if self.out.isatty() else ""
        self.out.write(f"{begin}step {step}/{len(self.tokens)}  validation loss {loss:.4f}\n")
        self.out.flush()


def duration(seconds: float) -> str:
    """Returns a time for people: 40 s, 12 min, 9.0 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
