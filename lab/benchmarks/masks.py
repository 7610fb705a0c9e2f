"""Measures what constraints on answers add to a step, for docs/build/structured-output.md.

    .venv/bin/python lab/benchmarks/masks.py --model DIR_OR_GGUF [--batch 32] [--steps 30] [--threads 2] [--json FILE]

One rank decodes a batch. Steps with and without constraints alternate, in one process, on the same sequences: the ratio of
their medians is the cost, and what the machine does meanwhile touches both alike. Every sequence has a schema of its own and
is in the middle of an object whose strings the model chooses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ryzanstein.constraints import Constraint
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.constraints.matching import Bits, GrammarState
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions
from ryzanstein.worker.text.grammars.tokens import token_table
from ryzanstein.worker.text.tokenizer import TextModel

BLOCK_SIZE = 16
MOST_GROUPS = 8  # of layers that share extents
WARM_STEPS = 4


def schema(number: int) -> Constraint:
    """An object of strings, numbers and lists, with names of its own."""
    text, count = {"type": "string", "minLength": 200}, {"type": "integer", "minimum": 0, "maximum": 10_000 + number}
    names = {f"title_{number}": text, f"count_{number}": count, "tags": {"type": "array", "items": text}}
    return Constraint.json_schema(json.dumps({"type": "object", "properties": names, "required": list(names)}))


@dataclass
class Sequence:
    """A sequence that decodes from position 0 on, over and over."""

    number: int
    blocks: list[int]
    new_state: Callable[[], GrammarState]
    state: GrammarState = field(init=False)
    position: int = 0
    token_id: int = 0

    def __post_init__(self) -> None:
        self.state = self.new_state()

    def row(self, *, constrained: bool) -> SampleRow:
        sampling = SamplingParams(seed=self.number, temperature=1.0)
        return SampleRow(sampling, 0, self.position, (), (), constraint=self.state if constrained else None)

    def take(self, token_id: int, *, constrained: bool) -> None:
        if constrained:
            self.state.accept(token_id)
            if self.state.finished:
                self.state = self.new_state()
        self.token_id = token_id
        self.position = (self.position + 1) % (len(self.blocks) * BLOCK_SIZE)


class Bench:
    """A loaded model, and a batch of sequences."""

    def __init__(self, model: Path, batch: int, threads: int) -> None:
        text = TextModel.load(model)
        self.table = token_table(text)
        tokenizer, bits = self.table.tokenizer(), Bits(self.table)
        options = RunnerOptions(
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_blocks=4 * batch * MOST_GROUPS,
            max_sequences=batch,
            num_threads=threads,
        )
        self.runner = ModelRunner.load(model, TensorParallel(0, 1, LocalCollectives()), options)
        self.runner.warm_up()
        self.masks = StepMasks(self.runner.vocab_size, threads)
        self.compile_s = []
        self.sequences = [self._sequence(i, tokenizer, bits) for i in range(batch)]
        self.step_number = 0

    def _sequence(self, number: int, tokenizer: object, bits: Bits) -> Sequence:
        began = time.perf_counter()
        matcher = compiled(schema(number), self.table, tokenizer)  # type: ignore[arg-type]
        self.compile_s.append(time.perf_counter() - began)
        blocks = list(range(4 * number, 4 * number + 4))
        return Sequence(number, blocks, lambda: GrammarState(matcher.deep_copy(), bits, ()))

    def step(self, *, constrained: bool) -> float:
        """Runs a step as rank 0 does, and returns its duration."""
        self.step_number += 1
        count = range(len(self.sequences))
        plan = self.runner.plans.plan(
            [each.token_id for each in self.sequences],
            [1 for _ in count],
            [each.position for each in self.sequences],
            [each.blocks for each in self.sequences],
            list(count),
        )
        plan = replace(plan, step=self.step_number, full_logits=True)
        rows = [each.row(constrained=constrained) for each in self.sequences]
        began = time.perf_counter()
        self.masks.begin(rows)
        tokens = self.runner.execute(plan, rows, self.masks)
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.take(token.token_id, constrained=constrained)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of constraints on answers.")
    parser.add_argument("--model", type=Path, required=True)
    for name, default in (("--batch", 32), ("--steps", 30), ("--threads", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.model, arguments.batch, arguments.threads)
    for _ in range(WARM_STEPS):
        bench.step(constrained=False)
        bench.step(constrained=True)
    computed_s, waited_s = bench.masks.computed_s, bench.masks.waited_s
    plain, constrained = [], []
    for _ in range(arguments.steps):
        plain.append(bench.step(constrained=False))
        constrained.append(bench.step(constrained=True))
    pairs = [with_masks / without for with_masks, without in zip(constrained, plain, strict=True)]
    document = {
        "vocabulary": bench.runner.vocab_size,
        "batch": arguments.batch,
        "threads": arguments.threads,
        "plain_step_ms": 1e3 * statistics.median(plain),
        "constrained_step_ms": 1e3 * statistics.median(constrained),
        "ratio_of_medians": statistics.median(constrained) / statistics.median(plain),
        "ratio_of_pairs_p50": statistics.median(pairs),
        "masks_ms": 1e3 * (bench.masks.computed_s - computed_s) / arguments.steps,
        "waited_ms": 1e3 * (bench.masks.waited_s - waited_s) / arguments.steps,
        "compile_ms": 1e3 * statistics.median(bench.compile_s),
    }
    for name, value in document.items():
        print(f"{name:22} {value:.3f}" if isinstance(value, float) else f"{name:22} {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
