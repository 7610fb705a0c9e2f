"""What happened, by virtual time and process: the log lines of the services and the simulator.

Only the newest lines are kept. All lines go into a digest, so that two runs of one seed can be
compared.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from ryzanstein.lab.simulation.machine.clock import CLOCK
from ryzanstein.lab.simulation.machine.loop import OWNER
from ryzanstein.lab.simulation.machine.process import Process

MAX_LINES = 50_000


@dataclass(frozen=True, slots=True)
class Line:
    """One log line; `process` is empty for the simulator's own."""

    at: float
    process: str
    level: str
    event: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        fields = " ".join(f"{key}={value}" for key, value in self.fields.items())
        return f"{self.at:12.6f} {self.process or '-':>14} {self.level:>7} {self.event}  {fields}"[:600]


class SimulationRecord:
    """The record of one simulation.

    The functions in `on_line` are called with every line of a service.
    """

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        self.on_line: list[Callable[[Line], None]] = []
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def say(self, event: str, **fields: object) -> None:
        """Records a line of the simulator: a fault, a client, a check."""
        self._add(Line(CLOCK.now, "", "", event, fields))

    def processor(self, _: object, level: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """A processor of structlog: records the line and drops it."""
        owner = OWNER.get()
        if not isinstance(owner, Process) or not owner.alive:
            raise structlog.DropEvent  # lines that a killed process writes at its end are dropped
        name = owner.name
        line = Line(CLOCK.now, name, level, str(event.pop("event", "")), dict(event))
        self._add(line)
        for notify in self.on_line:
            notify(line)
        raise structlog.DropEvent

    def _add(self, line: Line) -> None:
        if line.fields.get("exc_info"):
            line = Line(line.at, line.process, line.level, line.event, {**line.fields, "exc_info": traceback.format_exc()})
        self.lines.append(line)
        self._digest.update(f"{line.at:.9f} {line.process} {line.event}\n".encode())

    def install(self) -> None:
        """Makes every logger of this process write here."""
        structlog.configure(
            processors=[structlog.contextvars.merge_contextvars, self.processor],
            wrapper_class=structlog.make_filtering_bound_logger(20),
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )


def dump(lines: Iterable[Line]) -> str:
    return "\n".join(map(str, lines))
