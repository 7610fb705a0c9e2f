"""Times collectives over real rank processes: every operation, size and backend, in rounds.

The ranks of all backends run at the same time and take turns, so that a slow minute of the machine
affects all of them. A run lasts from the last rank's entry to the last rank's exit; waiting for a
late rank is not the collective's time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rich.console import Console

from ryzanstein.lab.bench.engine.collectives.messages import ELEMENT_BYTES, CollectiveRan, RunCollective
from ryzanstein.lab.bench.engine.collectives.ranks import CollectiveRanks
from ryzanstein.worker.ranks.messages import RankSpec

_PROBE_ITERATIONS = 5
_MAX_ITERATIONS = 20_000


@dataclass(frozen=True, slots=True)
class Survey:
    """What is measured: every operation with every size on every backend.

    Each takes `seconds` in all, split over the rounds.
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    backends: tuple[str, ...]
    rounds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One backend, operation and message size. `num_bytes` is what every rank holds afterwards."""

    backend: str
    op: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveResult:
    """Percentiles over all runs of one cell, and the bus bandwidth at the median.

    See `bus_bytes_per_s`.
    """

    backend: str
    op: str
    ranks: int
    bytes: int
    p50_s: float
    p99_s: float
    bus_bytes_per_s: float


class Samples:
    """The runs of one cell so far, in seconds, and how many more fit into a time."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self._iteration_s = 0.0

    def probe(self, ran: Sequence[CollectiveRan]) -> None:
        """Takes runs that do not count, to learn how long one takes."""
        begun_ns, ended_ns = min(rank.begun_ns[0] for rank in ran), max(rank.ended_ns[-1] for rank in ran)
        self._iteration_s = (ended_ns - begun_ns) / 1e9 / len(ran[0].begun_ns)

    def add(self, ran: Sequence[CollectiveRan]) -> None:
        self.probe(ran)
        self.latencies_s += latencies_s(ran)

    def iterations(self, seconds: float) -> int:
        """Returns how many runs fit into the time, at least one."""
        return max(1, min(_MAX_ITERATIONS, int(seconds / max(self._iteration_s, 1e-9))))


def latencies_s(ran: Sequence[CollectiveRan]) -> list[float]:
    """Returns the time of each run, from the last rank's entry to the last rank's exit."""
    entries = map(max, zip(*(rank.begun_ns for rank in ran), strict=True))
    exits = map(max, zip(*(rank.ended_ns for rank in ran), strict=True))
    return [(ended - begun) / 1e9 for begun, ended in zip(entries, exits, strict=True)]


def bus_bytes_per_s(op: str, ranks: int, num_bytes: int, seconds: float) -> float:
    """Returns the bus bandwidth of nccl-tests (doc/PERFORMANCE.md).

    It is size over time, corrected for what the best algorithm sends over each rank's link. So it
    compares with the hardware's peak for any number of ranks.
    """
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks, "broadcast": 1.0}
    return factors[op] * num_bytes / seconds


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the percentile by nearest rank."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


async def measure(survey: Survey, specs: Mapping[str, RankSpec], console: Console) -> list[CollectiveResult]:
    """Verifies each cell once, then times all of them round by round. `specs` is by backend."""
    ranks = next(iter(specs.values())).tp
    cells = [Cell(b, op, size) for op in survey.ops for size in survey.sizes for b in survey.backends]
    samples = {cell: Samples() for cell in cells}
    async with AsyncExitStack() as stack:
        groups = {b: await stack.enter_async_context(CollectiveRanks(spec)) for b, spec in specs.items()}
        for cell in cells:
            samples[cell].probe(await groups[cell.backend].run(_request(cell, _PROBE_ITERATIONS, verify=True)))
        for number in range(survey.rounds):
            console.print(f"round {number + 1} of {survey.rounds}")
            for cell in cells:
                iterations = samples[cell].iterations(survey.seconds / survey.rounds)
                samples[cell].add(await groups[cell.backend].run(_request(cell, iterations, verify=False)))
    return [_result(cell, ranks, samples[cell].latencies_s) for cell in cells]


def _request(cell: Cell, iterations: int, *, verify: bool) -> RunCollective:
    return RunCollective(cell.op, cell.num_bytes // ELEMENT_BYTES, iterations, verify)


def _result(cell: Cell, ranks: int, latencies: Sequence[float]) -> CollectiveResult:
    p50_s, p99_s = percentile(latencies, 0.5), percentile(latencies, 0.99)
    bandwidth = bus_bytes_per_s(cell.op, ranks, cell.num_bytes, p50_s)
    return CollectiveResult(cell.backend, cell.op, ranks, cell.num_bytes, p50_s, p99_s, bandwidth)
