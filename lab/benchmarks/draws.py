"""Measures the time to sample a row, with the kernel and with torch's operators: milliseconds per row, medians of 50.

.venv/bin/python lab/benchmarks/draws.py [--vocab 131072] [--rows 1] [--threads 1] [--rounds 50] [--no-torch]

A row has normal numbers times 2.5 ("typical"), 0.05 ("flat") or 8 ("peaked"), or these rounded, so that many are equal. `--cpu`
counts the thread's own CPU time, for machines with other load.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.functions.draw import Draw
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.sampling.truncation import drawn

CUTS: dict[str, dict[str, Any]] = {
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "top-k 50,000, top-p 0.95": {"top_k": 50_000, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
}


def distributions(rows: int, vocab: int) -> dict[str, torch.Tensor]:
    normal = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    return {"typical": normal * 2.5, "flat": normal * 0.05, "peaked": normal * 8, "rounded": (normal * 2.5).round()}


def median_ms(call: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    call()
    times = []
    for _ in range(rounds):
        began = clock()
        call()
        times.append(clock() - began)
    return statistics.median(times) * 1e3


@torch.inference_mode()
def measure(title: str, kernels: NativeKernels | None, arguments: argparse.Namespace) -> Table:
    """By cut and distribution, for one row."""
    logits = distributions(arguments.rows, arguments.vocab)
    clock = time.thread_time if arguments.cpu else time.perf_counter
    table = Table(title, *logits, title=f"ms/row of {arguments.vocab:,}, {arguments.rows} rows, {arguments.threads} threads")
    for name, cut in CUTS.items():
        sampling = SamplingParams(**cut)
        draws_R = [Draw.of(row, sampling, arguments.vocab, 0.4) for row in range(arguments.rows)]
        draw = drawn if kernels is None else kernels.sampling.draw
        calls = [partial(draw, logits_SV, draws_R) for logits_SV in logits.values()]
        table.add_row(name, *(f"{median_ms(call, arguments.rounds, clock) / arguments.rows:.2f}" for call in calls))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    console.print(models[0] if models else "unknown CPU")
    console.print(measure("kernel", NativeKernels(library()), arguments))
    if not arguments.no_torch:
        console.print(measure("torch", None, arguments))


if __name__ == "__main__":
    main()
