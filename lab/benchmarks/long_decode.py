"""Measures a decode step after short and after long contexts, for docs/concepts/kv-cache.md.

    .venv/bin/python lab/benchmarks/long_decode.py --model DIR_OR_GGUF [--contexts 1000,30000] [--batch 1] [--steps 20]
        [--threads 2] [--quantization none] [--kv-compression none] [--sparse-attention RULE] [--json FILE]

One rank decodes sequences whose contexts nobody computed: their keys and values are zeros, which are written once. Memory
that was never written is one page of the system's, wherever it is read: that would measure a cache, not memory. What a step
reads and computes does not depend on what the numbers are, so it takes the same time, and no prompt of 30,000 tokens is
computed before. That is not so with `quest`, whose choice depends on them. The contexts take turns step by step: what the
machine does meanwhile touches all alike. The figures hold for one rank with so many threads. With tensor parallelism each rank
reads its own heads, and those of a model with one key-value head all read the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import Rearrangement
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions

BLOCK_SIZE = 16
MOST_GROUPS = 8  # of layers that share extents
WARM_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures decode steps after long contexts.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--contexts", default="1000,30000")
    for name, number in (("--batch", 1), ("--steps", 20), ("--threads", 2)):
        parser.add_argument(name, type=int, default=number)
    for name, text in (("--quantization", "none"), ("--kv-compression", "none"), ("--sparse-attention", "")):
        parser.add_argument(name, default=text)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    contexts = [int(part) for part in given.contexts.split(",")]
    pages = (max(contexts) + WARM_STEPS + given.steps) // BLOCK_SIZE + 1
    options = RunnerOptions(
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=pages * given.batch * MOST_GROUPS + 1,
        max_sequences=given.batch,
        num_threads=given.threads,
        quantization=given.quantization,
        kv_compression=given.kv_compression,
        sparse_attention=given.sparse_attention,
    )
    runner = ModelRunner.load(given.model, TensorParallel(0, 1, LocalCollectives()), options)
    used = pages * given.batch * len(runner.extents.windows)
    runner.rearrange(Rearrangement([(used, block) for block in range(used)], runner.max_blocks))
    tables = [range(number * pages, (number + 1) * pages) for number in range(given.batch)]

    def step(context: int) -> float:
        """Returns the duration of a step in which each sequence of the batch gets one token."""
        needed = [table[: context // BLOCK_SIZE + 1] for table in tables]
        counts = [1] * given.batch
        plan = runner.plans.plan([5] * given.batch, counts, [context] * given.batch, needed, list(range(given.batch)))
        began = time.perf_counter()
        runner.hidden_logits(plan)
        return time.perf_counter() - began

    durations: dict[int, list[float]] = {context: [] for context in contexts}
    for number in range(WARM_STEPS + given.steps):
        for context in contexts:
            duration = step(context + number)
            if number >= WARM_STEPS:
                durations[context].append(duration)
    medians = {context: statistics.median(each) for context, each in durations.items()}
    for context, median in medians.items():
        spread = f"{1e3 * min(durations[context]):.1f} to {1e3 * max(durations[context]):.1f}"
        speed = medians[contexts[0]] / median
        print(f"context {context:>7,}: {1e3 * median:.1f} ms a step ({spread}), {speed:.2f}x the speed at {contexts[0]:,}")
    if given.json:
        given.json.write_text(
            json.dumps({"durations_s": durations} | {k: str(v) for k, v in vars(given).items()}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
