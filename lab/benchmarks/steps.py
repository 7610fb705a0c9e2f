"""Measures decode steps of a model on one rank, in programs and in calls for each layer, interleaved.

.venv/bin/python lab/benchmarks/steps.py --model DIR [--quantization int8] [--batch 1,4,8,32] [--steps 200] [--rounds 3]
    [--threads 2] [--busy]

Milliseconds, medians: plan in, tokens out, without scheduler and text. `--busy`: beside a process that computes all the time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import SampleRow, StepPlan
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions

CONTEXT, BLOCK = 100, 16
ROW = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())
PATHS = ("python", "auto")


def runner(arguments: argparse.Namespace, step: str, most: int) -> ModelRunner:
    """Returns a loaded model."""
    options = RunnerOptions(
        step=step,  # type: ignore[arg-type]
        num_blocks=(CONTEXT // BLOCK + 2) * most,
        block_size=BLOCK,
        num_threads=arguments.threads or None,
        quantization=arguments.quantization,
    )
    return ModelRunner.load(Path(arguments.model), TensorParallel(0, 1, LocalCollectives()), options)


def decode_plans(model: ModelRunner, batch: int) -> list[StepPlan]:
    """Returns steps that follow each other, as those of an answer do, up to the end of a page."""
    pages = CONTEXT // BLOCK + 1
    tables = [range(s * pages, (s + 1) * pages) for s in range(batch)]
    contexts = range((pages - 1) * BLOCK, pages * BLOCK)
    return [model.plans.plan([1] * batch, [1] * batch, [context] * batch, tables, list(range(batch))) for context in contexts]


def timed_ms(model: ModelRunner, plans: Sequence[StepPlan], steps: int) -> list[float]:
    found = []
    for step in range(steps):
        begun = time.perf_counter()
        model.execute(plans[step % BLOCK], [ROW] * len(plans[0].sampled))
        found.append((time.perf_counter() - begun) * 1e3)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch", default="1,4,8,32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--busy", action="store_true")
    arguments = parser.parse_args(words)
    batches = [int(size) for size in arguments.batch.split(",")]
    models = {path: runner(arguments, path, max(batches)) for path in PATHS}
    table = Table("batch", "calls, ms", "p90", "program, ms", "p90", "ratio")
    beside = subprocess.Popen([sys.executable, "-P", "-c", "while True: pass"]) if arguments.busy else None
    try:
        for batch in batches:
            times: dict[str, list[float]] = {path: [] for path in PATHS}
            for _ in range(arguments.rounds):
                for path, model in models.items():
                    times[path] += timed_ms(model, decode_plans(model, batch), arguments.steps)
            middle = [statistics.median(times[path]) for path in PATHS]
            high = [statistics.quantiles(times[path], n=10)[-1] for path in PATHS]
            cells = [f"{middle[0]:.3f}", f"{high[0]:.3f}", f"{middle[1]:.3f}", f"{high[1]:.3f}"]
            table.add_row(str(batch), *cells, f"{middle[0] / middle[1]:.2f}")
    finally:
        if beside is not None:
            beside.kill()
    Console().print(table, f"native layers: {models['auto'].native_layers:.2f} {models['auto'].without_native}")


if __name__ == "__main__":
    main()
