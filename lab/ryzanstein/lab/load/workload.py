"""What a load asks: a number of different conversations again and again, or what a trace recorded.

Each is greedy or drawn with a seed of its own, and ends at a length that is set: asked again, it has to get the same
tokens, on whichever node and through whatever faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.load.mooncake import BLOCK_TOKENS, TraceRow

_WORDS = (
    *("river", "stone", "moon", "house", "tree", "night", "cloud", "bread", "light", "water", "green", "table", "small"),
    *("paper", "winter", "road", "garden", "window", "music", "letter", "yellow", "mountain", "friend", "silver"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths are in tokens. `tokens_per_word` is the model's, measured; see `LoadRun.measure`."""

    num_input: int = 64
    num_output: int = 64
    num_turns: int = 1
    temperature: float = 0.7
    face: str = "grpc"
    model: str = ""
    call_s: float = 600.0
    tokens_per_word: float = 1.5


def conversations(shape: Shape, num_prompts: int, seed: int) -> Iterator[LoadQuestion]:
    """Yields `num_prompts` different conversations, again and again."""
    several = [_conversation(shape, seed, number) for number in range(num_prompts)]
    return (several[number % num_prompts] for number in count())


def recorded(rows: Sequence[TraceRow], shape: Shape, seed: int) -> Iterator[LoadQuestion]:
    """Yields the request of each row of a trace."""
    for number, row in enumerate(rows):
        text = _trace_text(row, shape.tokens_per_word, seed, number)
        yield _question(f"row-{number}", (text,), replace(shape, num_output=row.num_output), seed + number)


def probe(shape: Shape, num_words: int) -> LoadQuestion:
    """Returns a short request with a prompt of so many words, to count its tokens."""
    return _question(f"probe-{num_words}", (_text(random.Random(num_words), num_words),), replace(shape, num_output=1), 0)


def _conversation(shape: Shape, seed: int, number: int) -> LoadQuestion:
    rng = random.Random(f"{seed}/{number}")
    num_words = max(1, round(shape.num_input / shape.tokens_per_word))
    turns = tuple(_text(rng, num_words) for _ in range(shape.num_turns))
    return _question(f"prompt-{number}", turns, shape, seed + number)


def _question(kind: str, turns: tuple[str, ...], shape: Shape, seed: int) -> LoadQuestion:
    sampling: dict[str, Any] = {"temperature": shape.temperature, "max_tokens": shape.num_output, "ignore_eos": True}
    if shape.temperature:
        sampling["seed"] = seed
    if shape.face != "grpc":
        sampling["logprobs"] = 0  # chunks carry no token ids: one entry for each token is what can be counted
    return LoadQuestion(kind, turns, sampling, shape.face, shape.call_s, shape.model)


def _trace_text(row: TraceRow, tokens_per_word: float, seed: int, number: int) -> str:
    """Returns the words of the row's blocks, cut to its length; what no block covers is its own."""
    words: list[str] = []
    for block in row.blocks:
        words += _text(random.Random(f"{seed}/block/{block}"), round(BLOCK_TOKENS / tokens_per_word)).split()
    wanted = max(1, round(row.num_input / tokens_per_word))
    if len(words) < wanted:
        words += _text(random.Random(f"{seed}/row/{number}"), wanted - len(words)).split()
    return " ".join(words[:wanted])


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))
