"""The command `ryzanstein bench suite`: everything that must not become slower, in rounds.

It is timed next to reference kernels.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ryzanstein import errors
from ryzanstein.lab.bench.engine.engine import Workload, batches
from ryzanstein.lab.bench.engine.flight import losses_as_errors
from ryzanstein.lab.bench.engine.reference import References
from ryzanstein.lab.bench.engine.reference_ceilings import choose_buffer_bytes, measure_ceilings
from ryzanstein.lab.bench.engine.reference_ceilings import table as ceilings_table
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.lab.bench.engine.suite.collectives import CollectivesPart
from ryzanstein.lab.bench.engine.suite.document import MAX_ROUNDS, SCHEMA, SuiteDocument, SuiteFigure
from ryzanstein.lab.bench.engine.suite.engine import EnginePart
from ryzanstein.lab.bench.engine.suite.machine import SuiteMachine
from ryzanstein.lab.bench.engine.suite.models import DEMO_DIR, SuiteModel
from ryzanstein.lab.bench.engine.suite.parts import SmallParts
from ryzanstein.lab.bench.engine.suite.rounds import Part, RoundLog
from ryzanstein.worker.collectives.segment import MAX_RANKS

_MODELS, _QUICK = "demo,S,S:int8,S:q4_0", "demo"
_CEILING_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """What a suite runs. `models` are `demo` and presets of `ryzanstein synthesize`, as SuiteModel reads them."""

    models: tuple[str, ...]
    tps: tuple[int, ...]
    workload: Workload
    buffer_bytes: int

    def check(self) -> None:
        """Raises INVALID_ARGUMENT with the parameter."""
        for name in self.models:
            SuiteModel.parse(name)
        if not all(1 <= tp <= MAX_RANKS for tp in self.tps):
            raise errors.invalid("tp", f"must be 1 to {MAX_RANKS}", ",".join(map(str, self.tps)))


def run_suite(plan: SuitePlan, console: Console) -> SuiteDocument:
    """Runs the suite. Raises RyzansteinError, also for ranks that are lost."""
    plan.check()
    with TemporaryDirectory(prefix="ryzanstein-suite-") as directory, losses_as_errors():
        parts = _parts(plan, Path(directory))
        console.print("machine")
        ceilings = measure_ceilings(_CEILING_ROUNDS, plan.buffer_bytes)
        log = RoundLog(References.build(plan.buffer_bytes))
        asyncio.run(_rounds(parts, plan.workload.rounds, log, console))
    return SuiteDocument(SCHEMA, SuiteMachine.here(), ceilings, log.kernels(), log.figures())


def _parts(plan: SuitePlan, directory: Path) -> list[Part]:
    models = [SuiteModel.parse(name) for name in plan.models]
    paths = {model: model.write(directory) for model in models}
    engines = [
        EnginePart(model.name, path, tp, plan.workload, model.quantization) for model, path in paths.items() for tp in plan.tps
    ]
    return [*engines, CollectivesPart(), SmallParts(DEMO_DIR)]


async def _rounds(parts: Sequence[Part], rounds: int, log: RoundLog, console: Console) -> None:
    for number in range(rounds):
        console.print(f"round {number + 1} of {rounds}")
        log.begin_round()
        for part in parts:
            await part.round(log)


def table(figures: Sequence[SuiteFigure]) -> Table:
    """Returns the table for people: medians, and the quartiles of the ratio around its median."""
    visible = Table(title="suite", title_justify="left")
    for heading in ("figure", "median", "over", "ratio", "quartiles"):
        visible.add_column(heading, justify="left" if heading in ("figure", "over") else "right")
    for figure in figures:
        ratio = statistics.median(figure.ratios)
        visible.add_row(
            figure.name, show_seconds(statistics.median(figure.seconds)), figure.reference, f"{ratio:.4g}", _spread(figure)
        )
    return visible


def _spread(figure: SuiteFigure) -> str:
    if len(figure.rounds) < 2:
        return ""
    low, median, high = statistics.quantiles(figure.ratios, n=4, method="inclusive")
    return f"{low / median - 1:+.1%} {high / median - 1:+.1%}"


def show_seconds(seconds: float) -> str:
    """Returns the time with a suitable unit."""
    unit, factor = next(((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if seconds * factor >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"


def suite(
    *,
    models: Annotated[
        str, typer.Option(help=f"demo or presets of `synthesize`, with :FORMAT or without; default: {_MODELS}")
    ] = "",
    tp: Annotated[str, typer.Option(help="numbers of ranks, comma-separated")] = "1,2",
    batch: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=10**6)] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, max=10**6)] = 32,
    rounds: Annotated[int, typer.Option(min=1, max=MAX_ROUNDS)] = 12,
    buffer_mib: Annotated[int, typer.Option(min=0, max=16384, help="buffer of the kernel `read`; 0: twice the caches")] = 0,
    quick: Annotated[bool, typer.Option(help="by default only the demo model at batch 1 and 8")] = False,
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
) -> None:
    """Time the engine, collectives and small parts relative to reference kernels, for `bench compare`."""
    with refusals_as_exit() as people:
        sizes = batches(batch or ("1,8" if quick else "1,8,32"))
        chosen = tuple(dict.fromkeys((models or (_QUICK if quick else _MODELS)).split(",")))
        workload = Workload(sizes, prompt_tokens, new_tokens, rounds)
        plan = SuitePlan(chosen, _ranks(tp), workload, buffer_mib * 2**20 or choose_buffer_bytes())
        document = run_suite(plan, people)
        publish(msgspec.to_builtins(document), [ceilings_table(document.ceilings), table(document.figures)], json_path)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise errors.invalid("tp", "must be comma-separated integers", text) from error
