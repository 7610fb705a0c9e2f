"""Measures the quality of weight formats: the demo model's perplexity on held-out dialogues, with the engine's own runner.

    .venv/bin/python lab/benchmarks/perplexity.py [--dialogues 500] [--first 0] [--quantization none,fp16,int8] [--json]

Dialogues are fed token by token, many at once, as in decoding. `answers` counts only the assistant's tokens, on which the demo
model was trained; `text` counts every token after the first.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.demo.encoding import Encoded, encode
from ryzanstein.lab.demo.evaluate import NUM_DIALOGUES, held_out
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions

AT_ONCE = 64
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexities per token; the share of answers of which every token was the likeliest."""

    quantization: str
    answers: float
    text: float
    right: float
    num_answer_tokens: int
    num_tokens: int


def open_runner(model_dir: Path, quantization: str, longest: int) -> ModelRunner:
    num_blocks = AT_ONCE * blocks_of(longest)
    options = RunnerOptions(
        quantization=quantization,  # type: ignore[arg-type]
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_sequences=AT_ONCE,
    )
    return ModelRunner.load(model_dir, TensorParallel(0, 1, LocalCollectives()), options)


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def judge(runner: ModelRunner, dialogues: Sequence[Encoded], quantization: str) -> Quality:
    losses: list[Tensor] = []
    answer_losses: list[Tensor] = []
    right = [0, 0]
    for loss_T, likeliest_T, one in judged(runner, dialogues):
        losses.append(loss_T)
        for start, stop in one.answers:
            answer_losses.append(loss_T[start - 1 : stop - 1])
            right[0] += bool(likeliest_T[start - 1 : stop - 1].all())
            right[1] += 1
    return Quality(
        quantization, perplexity(answer_losses), perplexity(losses), right[0] / right[1], count(answer_losses), count(losses)
    )


def perplexity(losses: Iterable[Tensor]) -> float:
    return math.exp(torch.cat(list(losses)).double().mean().item())


def count(losses: Iterable[Tensor]) -> int:
    return sum(map(len, losses))


def judged(runner: ModelRunner, dialogues: Sequence[Encoded]) -> Iterator[tuple[Tensor, Tensor, Encoded]]:
    """For each dialogue, of every token after the first: its loss, and whether it was the likeliest."""
    longest_first = sorted(dialogues, key=lambda one: -len(one.ids))
    for first in range(0, len(longest_first), AT_ONCE):
        group = longest_first[first : first + AT_ONCE]
        steps = list(steps_of(runner, group))
        for row, one in enumerate(group):
            mine = steps[: len(one.ids) - 1]
            yield torch.stack([loss[row] for loss, _ in mine]), torch.stack([best[row] for _, best in mine]), one


def steps_of(runner: ModelRunner, group: Sequence[Encoded]) -> Iterator[tuple[Tensor, Tensor]]:
    """Losses of the next token and whether it is the likeliest, one for each dialogue that still has one: longest first."""
    blocks = blocks_of(len(group[0].ids))
    for position in range(len(group[0].ids) - 1):
        ids = [one.ids for one in group if len(one.ids) > position + 1]
        tables = [list(range(row * blocks, row * blocks + blocks)) for row in range(len(ids))]
        tokens, rows = [row[position] for row in ids], list(range(len(ids)))
        logits_SV = runner.hidden_logits(StepPlan(1, tokens, [1] * len(ids), [position] * len(ids), tables, rows, True))
        assert logits_SV is not None
        next_S = torch.tensor([row[position + 1] for row in ids])
        yield torch.nn.functional.cross_entropy(logits_SV, next_S, reduction="none"), logits_SV.argmax(1) == next_S


def as_table(results: Sequence[Quality]) -> str:
    lines = ["| weights | perplexity of answers | of all text | answers right |", "|---|---:|---:|---:|"]
    for one in results:
        changes = (one.answers / results[0].answers - 1, one.text / results[0].text - 1)
        cells = (f"{value:.5f} ({change:+.3%})" for value, change in zip((one.answers, one.text), changes, strict=True))
        lines.append(f"| {one.quantization} | {' | '.join(cells)} | {one.right:.2%} |")
    return "\n".join([*lines, "", f"{results[0].num_answer_tokens} tokens of answers, {results[0].num_tokens} in total"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--dialogues", type=int, default=NUM_DIALOGUES)
    parser.add_argument("--first", type=int, default=0, help="seed of the first dialogue")
    parser.add_argument("--quantization", default="none,fp16,int8", help="comma-separated; the first is the baseline")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    dialogues = [encode(tokenizer, one) for one in held_out(arguments.dialogues, first=arguments.first)]
    longest = max(len(one.ids) for one in dialogues)
    results = [
        judge(open_runner(arguments.model, quantization, longest), dialogues, quantization)
        for quantization in arguments.quantization.split(",")
    ]
    print(json.dumps([asdict(one) for one in results]) if arguments.json else as_table(results))


if __name__ == "__main__":
    main()
