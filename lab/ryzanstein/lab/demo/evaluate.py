"""Measures a model on held-out dialogues: exactly right answers per kind of turn, and perplexity.

    python -P -m ryzanstein.lab.demo.evaluate [--model DIRECTORY] [--dialogues 500] [--first 0] [--long] [--json]

Every answer is judged after the gold history. Greedy decoding then gives the gold answer exactly
when the gold token is the most likely one at each of its positions, so one forward pass judges all
turns of a dialogue.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.demo.dialogues import Dialogue, Mix, dialogue
from ryzanstein.lab.demo.encoding import Encoded, encode
from ryzanstein.lab.demo.words import Split

NUM_DIALOGUES = 500
LONG = Mix(max_turns=20, repeat=0.1, count=0.12, long_counts=0.5)


@dataclass
class EvaluationReport:
    """The numbers of right and of requested answers per kind, and the loss of all answer tokens."""

    right: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    """Question, right answer and likeliest tokens in its place, for each answer that was wrong."""
    loss: float = 0.0
    num_tokens: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / max(self.num_tokens, 1))

    def share(self, prefix: str = "") -> float:
        """Returns the share of right answers among the kinds that start with the prefix."""
        kinds = [kind for kind in self.asked if kind.startswith(prefix)]
        return sum(self.right[kind] for kind in kinds) / max(sum(self.asked[kind] for kind in kinds), 1)

    def rows(self) -> list[tuple[str, int, int, float]]:
        """Returns kind, right, asked, share; one row per kind and one for all recalls."""
        rows = [(kind, self.right[kind], self.asked[kind], self.share(kind)) for kind in sorted(self.asked)]
        recalls = [row for row in rows if row[0].startswith("recall")]
        total = ("all recalls", sum(row[1] for row in recalls), sum(row[2] for row in recalls), self.share("recall"))
        return [*rows, total]


def held_out(num_dialogues: int = NUM_DIALOGUES, mix: Mix | None = None, first: int = 0) -> list[Dialogue]:
    """Returns dialogues of the held-out split, from a first seed on."""
    return [dialogue(Split.HELD_OUT, seed, mix) for seed in range(first, first + num_dialogues)]


@torch.inference_mode()
def evaluate(model: nn.Module, tokenizer: Tokenizer, dialogues: Sequence[Dialogue]) -> EvaluationReport:
    """Evaluates every answer of every dialogue."""
    report = EvaluationReport()
    for one in dialogues:
        encoded = encode(tokenizer, one)
        ids_T = torch.tensor(encoded.ids)
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
        _judge(report, tokenizer, one, encoded, logits_TV)
    return report


def _judge(report: EvaluationReport, tokenizer: Tokenizer, one: Dialogue, encoded: Encoded, logits_TV: Tensor) -> None:
    for turn, (start, stop) in zip(one.turns, encoded.answers, strict=True):
        gold_A = torch.tensor(encoded.ids[start:stop])
        logits_AV = logits_TV[start - 1 : stop - 1]
        best_A = logits_AV.argmax(-1)
        right = torch.equal(best_A, gold_A)
        report.asked[turn.kind] += 1
        report.right[turn.kind] += right
        report.loss += functional.cross_entropy(logits_AV, gold_A, reduction="sum").item()
        report.num_tokens += stop - start
        if not right:
            report.wrong.append((turn.user, turn.assistant, tokenizer.decode(best_A.tolist())))


def as_table(report: EvaluationReport) -> str:
    """Returns the report as a Markdown table."""
    lines = ["| kind | right | of | share |", "|---|---:|---:|---:|"]
    lines += [f"| {kind} | {right} | {asked} | {share:.1%} |" for kind, right, asked, share in report.rows()]
    return "\n".join([*lines, "", f"Perplexity of the answers: {report.perplexity:.4f} per token ({report.num_tokens} tokens)"])


def as_json(report: EvaluationReport) -> str:
    """Returns the report as JSON."""
    kinds = {kind: {"right": right, "asked": asked} for kind, right, asked, _ in report.rows()}
    return json.dumps({"kinds": kinds, "perplexity": report.perplexity, "num_tokens": report.num_tokens})


def main() -> None:
    """Evaluates a model directory with transformers."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--dialogues", type=int, default=NUM_DIALOGUES)
    parser.add_argument("--first", type=int, default=0, help="seed of the first dialogue")
    parser.add_argument("--long", action="store_true", help="longer dialogues with more and longer counts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers too")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(arguments.model)  # in evaluation mode
    dialogues = held_out(arguments.dialogues, LONG if arguments.long else None, arguments.first)
    report = evaluate(model, tokenizer, dialogues)
    print(as_json(report) if arguments.json else as_table(report))
    if arguments.wrong:
        print(*report.wrong, sep="\n")


if __name__ == "__main__":
    main()
