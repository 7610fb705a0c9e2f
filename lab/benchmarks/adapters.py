"""Measures decode steps whose rows have adapters beside steps without any, on one rank, interleaved.

.venv/bin/python lab/benchmarks/adapters.py [--preset M] [--layers 4] [--quantization int8] [--rank 16] [--adapters 100]
    [--steps 30] [--rounds 5] [--threads 2] [--half] [--cpu] [--folder DIR]

A synthetic model of the preset's widths, with fewer layers, and random adapters of all linears are written to a temporary
folder. Milliseconds, medians: plan in, tokens out. In each round the adapters are dropped and mapped again, so all steps run on
the same memory. `ratio` is to the step of as many rows while no adapter is mapped, which is what a model without the feature
computes. `GB/s`: the bytes of a step's adapters, by what it takes longer; `ryzanstein bench machine` has the memory's speed.
`--half`: factors in float16, as nodes keep those of quantized models. `--cpu`: processor time, with `--threads 1` for a machine
that does other things too.
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


def loaded(arguments: argparse.Namespace, model_dir: Path) -> ModelRunner:
    """Returns a model that can run the larger batch."""
    options = RunnerOptions(
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
    parser.add_argument("--rounds", type=int, default=5)
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
    model = loaded(arguments, folder / "model")
    paths = list(write_adapters(arguments, model.adaptable, folder))
    nbytes = paths[0].stat().st_size
    console = Console()
    console.print(f"{len(paths)} adapters of {nbytes / 2**20:.1f} MiB")
    cases = [(1, None), (1, 0), (1, 1), (MANY, None), (MANY, 0), *((MANY, count) for count in (4, MANY) if count <= len(paths))]
    clock = time.process_time if arguments.cpu else time.perf_counter
    times: dict[tuple[int, int | None], list[float]] = {case: [] for case in cases}
    for _ in range(arguments.rounds + 1):  # the first is not counted: memory is read for the first time
        for batch, count in cases:
            map_adapters(model, () if count is None else paths)
            times[batch, count] += timed_ms(model, decode_plans(model, batch, count or 0), arguments.steps, clock)
    table = Table("rows", "adapters", "ms", "p90", "ratio", "GB/s")
    for batch, count in cases:
        found, base = times[batch, count][arguments.steps :], statistics.median(times[batch, None][arguments.steps :])
        middle, p90 = statistics.median(found), statistics.quantiles(found, n=10)[-1]
        rate = f"{count * nbytes / 1e6 / (middle - base):.1f}" if count and middle > base else ""
        used = "none mapped" if count is None else f"{count} of {len(paths)}"
        table.add_row(str(batch), used, f"{middle:.3f}", f"{p90:.3f}", f"{middle / base:.3f}", rate)
    console.print(table)


def map_adapters(model: ModelRunner, paths: Sequence[Path]) -> None:
    """Maps these adapters alone."""
    for slot in range(1, MANY + 1):
        model.drop_adapter(slot)
    for slot, path in enumerate(paths, start=1):
        model.map_adapter(slot, path)


if __name__ == "__main__":
    main()
