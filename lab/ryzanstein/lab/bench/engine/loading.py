"""The command `ryzanstein bench loading`: how long ranks take to start, and their weights' memory.

It uses real ranks under the same group as a node's, started again in each round, with the numbers
of ranks interleaved. Times are by phase. Each rank reports its own measurements; the size of its
slice is computed separately, from the shapes.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ryzanstein import errors
from ryzanstein.lab.bench.engine.flight import losses_as_errors
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.process.allotment import whole_cores
from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import RANK_COMMAND, ForkServer
from ryzanstein.worker.ranks.starting.process import thread_environment
from ryzanstein.worker.settings.quantization import Quantization
from ryzanstein.worker.settings.rank_settings import ModelSettings
from ryzanstein.worker.supervision.group import GroupEvents
from ryzanstein.worker.supervision.messages import RankReady

PHASES = ("spawn", "import", "group", "load", "warm_up")


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds over the rounds."""

    median_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class LoadingResult:
    """One of `tp` ranks. Bytes are the most of any round.

    `slice_bytes` is the size of its weights by their shapes. `baseline_bytes` is the process before
    the phase "load": Python and torch. `resident_bytes` is its growth after that phase,
    `peak_bytes` its largest growth.
    """

    tp: int
    rank: int
    phases: dict[str, PhaseTime]
    ready_s: PhaseTime
    slice_bytes: int
    resident_bytes: int
    peak_bytes: int
    baseline_bytes: int

    @property
    def resident_ratio(self) -> float:
        return self.resident_bytes / self.slice_bytes

    @property
    def peak_ratio(self) -> float:
        return self.peak_bytes / self.slice_bytes


async def start_once(spec: RankSpec) -> list[RankReady]:
    """Starts ranks and returns their reports of being ready, by rank.

    They have ended when it returns. Raises RanksLost, RanksRefused.
    """
    events = GroupEvents(lambda events: None, lambda trace: None, lambda: False)
    async with ForkServer(RANK_COMMAND, thread_environment(spec)) as server:
        group = RankGroup(spec, GroupBounds(), events, server)
        try:
            return await group.start()
        finally:
            await group.end(graceful=False)


async def measure(specs: Sequence[RankSpec], rounds: int, console: Console) -> list[LoadingResult]:
    """Starts every number of ranks once per round.

    One start of each comes first and is not counted: it fills the page cache.
    """
    answers: list[list[list[RankReady]]] = [[] for _ in specs]
    for number in range(rounds + 1):
        for spec, starts in zip(specs, answers, strict=True):
            starts.append(await start_once(spec))
            slowest_s = max(ready.startup_phases["load"] for ready in starts[-1])
            console.print(f"round {number or 'not counted'}, {spec.tp} ranks: load {slowest_s:.3f} s")
    return [
        _result(spec, _slice_bytes(spec, rank), [start[rank] for start in starts[1:]])
        for spec, starts in zip(specs, answers, strict=True)
        for rank in range(spec.tp)
    ]


def _slice_bytes(spec: RankSpec, rank: int) -> int:
    """Returns the size of one rank's weights, by their shapes. Raises ModelRefused."""
    from ryzanstein.worker.collectives.local import LocalCollectives
    from ryzanstein.worker.collectives.parallel import TensorParallel
    from ryzanstein.worker.model.loading import slice_bytes
    from ryzanstein.worker.ranks.starting.startup import runner_options

    return slice_bytes(Path(spec.model), TensorParallel(rank, spec.tp, LocalCollectives()), runner_options(spec, "cpu"))


def _result(spec: RankSpec, num_bytes: int, starts: Sequence[RankReady]) -> LoadingResult:
    return LoadingResult(
        tp=spec.tp,
        rank=starts[0].rank,
        phases={phase: _time([start.startup_phases[phase] for start in starts]) for phase in PHASES},
        ready_s=_time([sum(start.startup_phases.values()) for start in starts]),
        slice_bytes=num_bytes,
        resident_bytes=max(start.resident_bytes["load"] - start.resident_bytes["group"] for start in starts),
        peak_bytes=max(start.peak_bytes["load"] - start.resident_bytes["group"] for start in starts),
        baseline_bytes=max(start.resident_bytes["group"] for start in starts),
    )


def _time(durations_s: Sequence[float]) -> PhaseTime:
    return PhaseTime(statistics.median(durations_s), max(durations_s))


def times_table(results: Sequence[LoadingResult]) -> Table:
    """Returns the table for people: the median of each phase, and the longest loading."""
    visible = Table(title="load: seconds", title_justify="left")
    for heading in ("tp", "rank", *PHASES, "ready", "load, max"):
        visible.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        medians = (*(result.phases[phase].median_s for phase in PHASES), result.ready_s.median_s)
        times_s = (*medians, result.phases["load"].max_s)
        visible.add_row(str(result.tp), str(result.rank), *(f"{time_s:.2f}" for time_s in times_s))
    return visible


def memory_table(results: Sequence[LoadingResult]) -> Table:
    """Returns the table for people: what the phase "load" adds to a process, and its slice."""
    visible = Table(title="load: memory", title_justify="left")
    for heading in ("tp", "rank", "before", "slice", "resident", "resident / slice", "peak / slice"):
        visible.add_column(heading, justify="right")
    for result in results:
        sizes = (result.baseline_bytes, result.slice_bytes, result.resident_bytes)
        visible.add_row(
            *(str(result.tp), str(result.rank)),
            *(f"{size / 2**20:.0f} MiB" for size in sizes),
            *(f"{ratio:.3f}" for ratio in (result.resident_ratio, result.peak_ratio)),
        )
    return visible


def document(model: Path, results: Sequence[LoadingResult]) -> dict[str, object]:
    """Returns the document for programs."""
    rows = [{**asdict(result), "resident_ratio": result.resident_ratio, "peak_ratio": result.peak_ratio} for result in results]
    return {"model": str(model), "results": rows}


def rank_counts(text: str) -> tuple[int, ...]:
    """Parses `1,2`; each once. Raises INVALID_ARGUMENT for what is not a number above 0."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise errors.invalid("tp", "must be comma-separated integers", text) from error
    if min(counts) < 1:
        raise errors.invalid("tp", "must be at least 1", min(counts))
    return counts


def loading(
    *,
    model: Annotated[Path, typer.Option(help="checkpoint directory", exists=True, file_okay=False)],
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
    tp: Annotated[str, typer.Option(help="numbers of ranks, comma-separated")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, max=10**4)] = 5,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="per rank; 0: the cores divided by the ranks")] = 0,
    quantization: Annotated[Quantization, typer.Option(help="weight format")] = "none",
) -> None:
    """Measure how long ranks take to start on this machine's CPU, and the memory of their weights."""
    with refusals_as_exit() as people:
        cores = whole_cores()
        specs = [
            RankSpec(
                model=str(model),
                tp=count,
                threads=threads or max(1, cores // count),
                device="cpu",
                settings=ModelSettings(quantization=quantization),
                log_level="warning",
            )
            for count in rank_counts(tp)
        ]
        with losses_as_errors():
            results = asyncio.run(measure(specs, rounds, people))
        publish(document(model, results), [times_table(results), memory_table(results)], json_path)
