"""What a fault is: where it strikes, how, what detects it, and what it may cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum

from ryzanstein.lab.chaos.stage.layouts import PLAIN, ClusterLayout
from ryzanstein.lab.chaos.stage.logs import LogLine
from ryzanstein.lab.chaos.stage.stage import Stage
from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.reading import AnswerReading, TokenArrival


class Scope(Enum):
    """The streams that a strike hits.

    They are those of the victim node, those of its router, the aimed one, or all.
    """

    NODE = "node"
    ROUTER = "router"
    READER = "reader"
    ALL = "all"


class Resume(Enum):
    """What counts as the first new token: one from another node, one on another call, or any."""

    MOVED = "moved"
    REJOINED = "rejoined"
    ANY = "any"

    def holds(self, arrival: TokenArrival, victims: frozenset[str], calls_before: int) -> bool:
        match self:
            case Resume.MOVED:
                return bool(arrival.node_id) and arrival.node_id not in victims
            case Resume.REJOINED:
                return arrival.call > calls_before
            case Resume.ANY:
                return True


@dataclass(frozen=True, slots=True)
class Sign:
    """A log line that shows the fault.

    It is from a service whose name begins with `service`, has this event, and in each of these
    fields one of the given values.
    """

    service: str
    event: str
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def matches(self, line: LogLine) -> bool:
        if not line.service.startswith(self.service) or line.event != self.event:
            return False
        return all(str(line.fields.get(name)) in values for name, values in self.fields.items())

    def __str__(self) -> str:
        fields = "".join(f" {name}={'|'.join(values)}" for name, values in self.fields.items())
        return f"{self.service}: {self.event}{fields}"


@dataclass(frozen=True, slots=True)
class Victim:
    """What a strike hits. `reading` is the aimed stream; `rng` decides what is left open."""

    reading: AnswerReading
    node_id: str
    router: str
    rng: random.Random


Strike = Callable[[Stage, Victim], AbstractAsyncContextManager[frozenset[str]]]
"""A context manager: the fault is there once entered, and lifted on exit.

It yields the nodes that it hit.
"""


@dataclass(frozen=True, slots=True)
class FaultBounds:
    """How long a fault may take, in seconds; None: nothing is promised."""

    detected_s: float | None = None
    serving_s: float | None = None
    rerouted_s: float | None = 0.1
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table.

    `signs` detect the fault, and the earliest counts. Without signs the client detects it, by its
    broken stream. The fault lasts at least `lasts_s`, even if the struck streams end before. It is
    lifted after `at_most_s` in any case.

    - `runs_divisor`: divides the number of runs; `most_runs` limits it.
    - `healthy_left`: a node is left, so no request may fail.
    - `in_turn`: each run strikes the next node.
    - `counts_beats`: false alarms are counted.
    - `beside`: a question to send besides the load while the fault lasts, by run.
    - `own`: a question that is asked for this fault, by run, and aimed at.
    - `kinds`: the kinds of streams that may be aimed at.
    - `in_flight_s`: tokens that arrive this soon after the strike were in flight.
    - `unwanted`: what must not be logged while the fault lasts. No breaker may open then either.
    - `spared_pause_s`: answers of the nodes' other models may not pause for longer, and no such
      answer may move. None: nothing is promised to them.
    """

    name: str
    what: str
    strike: Strike
    signs: tuple[Sign, ...] = ()
    layout: ClusterLayout = PLAIN
    scope: Scope = Scope.NODE
    resumes: Resume = Resume.MOVED
    bounds: FaultBounds = FaultBounds()
    lasts_s: float = 0.0
    at_most_s: float = 30.0
    runs_divisor: int = 1
    most_runs: int = 1000
    needs_network: bool = False
    healthy_left: bool = True
    in_turn: bool = False
    counts_beats: bool = False
    alongside: Callable[[int], LoadQuestion] | None = None
    own: Callable[[int], LoadQuestion] | None = None
    kinds: tuple[str, ...] = ("greedy", "sampled", "n3", "stop", "session")
    in_flight_s: float = 0.0
    unwanted: tuple[Sign, ...] = ()
    spared_pause_s: float | None = None

    def runs(self, asked: int) -> int:
        return min(self.most_runs, max(1, asked // self.runs_divisor))
