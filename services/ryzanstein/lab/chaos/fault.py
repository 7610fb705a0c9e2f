"""What a fault is: where it strikes, how, what shows it, and what it may cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum

from ryzanstein.lab.chaos.layouts import PLAIN, ClusterLayout
from ryzanstein.lab.chaos.logs import LogLine
from ryzanstein.lab.chaos.questions import LoadQuestion
from ryzanstein.lab.chaos.reading import AnswerReading, TokenArrival
from ryzanstein.lab.chaos.stage import Stage


class Scope(Enum):
    """Which streams a strike hits: those of the victim node, of its router, the aimed one, or all."""

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
    """A log line that shows the fault: of a service whose name begins so, with this event and these fields (each one of)."""

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
    """Whom a strike hits. `reading` is the stream that was aimed at, `rng` decides what is left open."""

    reading: AnswerReading
    node_id: str
    router: str
    rng: random.Random


Strike = Callable[[Stage, Victim], AbstractAsyncContextManager[frozenset[str]]]
"""Entered, the fault is there; left, it is lifted. Gives the nodes that it hit."""


@dataclass(frozen=True, slots=True)
class FaultBounds:
    """What a fault may take, in seconds; None: nothing is promised."""

    detected_s: float | None = None
    serving_s: float | None = None
    rerouted_s: float | None = 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table. `signs` detect it, the first of them in time counts; without signs the client does, by its
    broken stream. It lasts `lasts_s` at least, also when the struck streams are done before; after `at_most_s` it is lifted,
    done or not.

    `runs_divisor`: it has one run where others have so many; `most_runs` at most. `healthy_left`: a node is left, so that no
    request may fail. `in_turn`: each run strikes the next node. `counts_beats`: false alarms are looked for. `beside`: what is
    asked besides the load while it lasts, by run. `kinds`: of the streams that are aimed at. `in_flight_s`: tokens that come
    so soon after the strike were on their way. `unwanted`: what may not be said while it lasts; nor may a breaker open then.
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
    beside: Callable[[int], LoadQuestion] | None = None
    kinds: tuple[str, ...] = ("greedy", "sampled", "n3", "stop", "session")
    in_flight_s: float = 0.0
    unwanted: tuple[Sign, ...] = ()

    def runs(self, asked: int) -> int:
        return min(self.most_runs, max(1, asked // self.runs_divisor))
