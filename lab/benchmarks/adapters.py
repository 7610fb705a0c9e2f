"""Measures decode steps whose rows have adapters beside steps without any, on one rank, interleaved.

.venv/bin/python lab/benchmarks/adapters.py [--preset M] [--layers 4] [--quantization int8] [--rank 16] [--adapters 100]
    [--steps 30] [--rounds 3] [--threads 2] [--half] [--cpu] [--folder DIR]

A synthetic model of the preset's widths, with fewer layers, and random adapters of all linears are written to a temporary
folder. Milliseconds, medians: plan in, tokens out. `ratio` is to the step of as many rows before any adapter was mapped, which
is what a model without the feature computes; `calls` is such a step in calls for each layer, as every step with adapters is.
`--half`: factors in float16. `--cpu`: processor time, with `--threads 1` for a machine that does other things too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ryzanstein.generation.request import SamplingParams
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import PRESETS
from ryzanstein.worker.adapters.factors import AdaptedWeight, Adapter
from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import SampleRow, StepPlan
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions

CONTEXT, BLOCK, MANY = 100, 16, 100
ROW = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())


def loaded(arguments: argparse.Namespace, model_dir: Path, step: str) -> ModelRunner:
    """Returns a model that can run the larger batch."""
    options = RunnerOptions(
        step=step,  # type: ignore[arg-type]
        num_blocks=(CONTEXT // BLOCK + 2) * MANY,
        block_size=BLOCK,
        max_sequences=MANY,
        num_threads=arguments.threads or None,
        quantization=arguments.quantization,
    )
    return ModelRunner.load(model_dir, TensorParallel(0, 1, LocalCollectives()), options)


def write_adapters(arguments: argparse.Namespace, adaptable: Mapping[str, tuple[int, int]], folder: Path) -> Iterator[Path]:
    """Yields random adapters of all linears of the layers."""
    generator = np.random.default_rng(1)
    for number in range(arguments.adapters):
        weights = {
            name: AdaptedWeight(
                generator.standard_normal((arguments.rank, shape[0]), np.float32) * np.float32(0.01),
                generator.standard_normal((shape[1], arguments.rank), np.float32) * np.float32(0.01),
                None,
                2.0,
            )
            for name, shape in adaptable.items()
            if ".layers." in name
        }
        pack(Adapter(weights), folder / f"adapter-{number}", half=arguments.half)
        yield folder / f"adapter-{number}"


def decode_plans(model: ModelRunner, batch: int, num_adapters: int) -> list[StepPlan]:
    """Returns steps that follow each other, up to the end of a page. Rows take turns with adapters, if there are any."""
    pages = CONTEXT // BLOCK + 1
    tables = [range(s * pages, (s + 1) * pages) for s in range(batch)]
    contexts = range((pages - 1) * BLOCK, pages * BLOCK)
    runs = [(1 + row % num_adapters, 1) for row in range(batch)] if num_adapters else []
    plans = [model.plans.plan([1] * batch, [1] * batch, [context] * batch, tables, list(range(batch))) for context in contexts]
    return [msgspec.structs.replace(plan, adapters=runs) for plan in plans]


def timed_ms(model: ModelRunner, plans: Sequence[StepPlan], steps: int, clock: Callable[[], float]) -> list[float]:
    found = []
    for step in range(steps):
        begun = clock()
        model.execute(plans[step % BLOCK], [ROW] * len(plans[0].sampled))
        found.append((clock() - begun) * 1e3)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="M", choices=PRESETS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--folder")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    shape = replace(PRESETS[arguments.preset], num_layers=arguments.layers)
    synthesize(folder / "model", Recipe("llama", shape, "float32", 0, 1))
    plain, calls, model = (loaded(arguments, folder / "model", step) for step in ("auto", "python", "auto"))
    nbytes, began = 0, time.perf_counter()
    for slot, path in enumerate(write_adapters(arguments, model.adaptable, folder), start=1):
        model.map_adapter(slot, path)
        nbytes = path.stat().st_size
    console = Console()
    console.print(f"{arguments.adapters} adapters of {nbytes / 2**20:.1f} MiB: {time.perf_counter() - began:.1f} s")
    some = [count for count in (4, 100) if count <= arguments.adapters]
    cases: list[tuple[str, ModelRunner, int, int]] = []
    for batch, counts in ((1, [1]), (MANY, some)):
        cases += [(f"{batch} rows, none mapped", plain, batch, 0), (f"{batch} rows, none mapped, calls", calls, batch, 0)]
        cases += [(f"{batch} rows, none used", model, batch, 0)]
        cases += [(f"{batch} rows, {count} adapters", model, batch, count) for count in counts]
    clock = time.process_time if arguments.cpu else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name, *_ in cases}
    for _ in range(arguments.rounds):
        for name, runner, batch, count in cases:
            times[name] += timed_ms(runner, decode_plans(runner, batch, count), arguments.steps, clock)
    table = Table("step", "ms", "p90", "ratio")
    for name, _, batch, _ in cases:
        middle, base = statistics.median(times[name]), statistics.median(times[f"{batch} rows, none mapped"])
        table.add_row(name, f"{middle:.3f}", f"{statistics.quantiles(times[name], n=10)[-1]:.3f}", f"{middle / base:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
