"""The command `ryzanstein bench scaling`: what several ranks gain over one, on CPUs.

All run the same model in the same run.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ryzanstein import errors
from ryzanstein.lab.bench.engine.engine import batches
from ryzanstein.lab.bench.engine.flight import losses_as_errors
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.lab.bench.engine.scaling.figures import figure_table, figures, ratio_table, ratios
from ryzanstein.lab.bench.engine.scaling.layouts import RankLayout, parse_layouts
from ryzanstein.lab.bench.engine.scaling.rounds import Bench, ScalingLoad
from ryzanstein.lab.bench.engine.scaling.unsplit import measure_unsplit
from ryzanstein.worker.settings.quantization import QUANTIZATIONS
from ryzanstein.worker.text.model_files import ModelFiles


def choose_loads(batch: str, steps: int, prefill_tokens: int, context_length: int) -> list[ScalingLoad]:
    """Returns decode steps of each batch ("": none), and a prefill (0: none).

    Raises INVALID_ARGUMENT if no load is left or one is too long.
    """
    loads = [ScalingLoad.decode(size, steps) for size in (batches(batch) if batch else ())]
    if prefill_tokens:
        loads.append(ScalingLoad.prefill(prefill_tokens))
    if not loads:
        raise errors.invalid("batch", "must not be empty without a prefill", batch)
    for load in loads:
        if load.batch < 1:
            raise errors.invalid("batch", "must be at least 1", load.batch)
        if load.prompt_tokens + load.new_tokens > context_length:
            raise errors.context_too_long(load.prompt_tokens, load.new_tokens, context_length)
    return loads


def scaling(
    *,
    model: Annotated[Path, typer.Option(help="checkpoint directory", exists=True, file_okay=False)],
    layouts: Annotated[str, typer.Option(help="ranks x threads per rank, pinned or not")] = "1x1,2x1,2x1:pin,1x2",
    quantization: Annotated[str, typer.Option(help=f"weight format: {', '.join(QUANTIZATIONS)}")] = "none",
    collectives: Annotated[str, typer.Option(help="shm, gloo or auto")] = "auto",
    batch: Annotated[str, typer.Option(help="batch sizes of decode steps, comma-separated; empty: none")] = "1,8",
    steps: Annotated[int, typer.Option(min=2, max=10**6, help="decode steps per batch and round")] = 16,
    prefill_tokens: Annotated[int, typer.Option(min=0, max=10**6, help="prompt of the prefill; 0: no prefill")] = 512,
    rounds: Annotated[int, typer.Option(min=1, max=10**4)] = 3,
    unsplit: Annotated[bool, typer.Option("--unsplit", help="also measure the unsplit work, on a narrow model")] = False,
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
) -> None:
    """Measure tokens per second and communication of one rank and of several, as ratios within each round."""
    with refusals_as_exit() as people, losses_as_errors():
        kind = next((name for name in QUANTIZATIONS if name == quantization), None)
        if kind is None:
            raise errors.invalid("quantization", f"must be one of {', '.join(QUANTIZATIONS)}", quantization)
        if collectives not in ("auto", "shm", "gloo"):
            raise errors.invalid("collectives", "must be auto, shm or gloo", collectives)
        files = ModelFiles.read(model)
        chosen = parse_layouts(layouts)
        loads = choose_loads(batch, steps, prefill_tokens, files.context_length)
        bench = Bench(model, files.vocab_size, kind, collectives)
        document, tables = asyncio.run(_measure(bench, chosen, loads, rounds, people, unsplit=unsplit))
        publish(document, tables, json_path)


async def _measure(
    bench: Bench, layouts: tuple[RankLayout, ...], loads: list[ScalingLoad], rounds: int, people: Console, *, unsplit: bool
) -> tuple[dict[str, Any], list[Any]]:
    samples = await bench.measure(layouts, loads, rounds, people)
    rows, compared = figures(samples), ratios(samples)
    document: dict[str, Any] = {"model": str(bench.model), "quantization": bench.quantization}
    document |= {"results": [asdict(row) for row in rows], "ratios": [asdict(row) for row in compared]}
    tables = [figure_table(rows), ratio_table(compared)]
    if unsplit:
        twins = await measure_unsplit(bench, loads, rounds, people)
        document["unsplit"] = [asdict(row) for row in twins]
        tables.append(figure_table(twins))
    return document, tables
