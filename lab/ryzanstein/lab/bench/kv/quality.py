"""Perplexity and greedy answers of all options beside the reference, on the same tokens.

Pass keys: a number that stands somewhere in a long text, and is asked for at its end.

The text is the user's, or the licences; the key is drawn from the place.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from ryzanstein import errors
from ryzanstein.lab.bench.kv.sequence import KvSequence
from ryzanstein.lab.bench.quality.document import GreedyMatch, WindowSums
from ryzanstein.lab.bench.quality.scoring import Judged

DEPTHS = (0.1, 0.5, 0.9)
_NEW_TOKENS = 12


def pass_key_prompt(tokenizer: Tokenizer, text_ids: Sequence[int], length: int, depth: float) -> tuple[list[int], str]:
    """Returns a prompt of `length` tokens, and the key that should follow."""
    key = str(random.Random(f"{length} {depth}").randrange(10_000, 100_000))
    needle = tokenizer.encode(
        f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n", add_special_tokens=False
    ).ids
    question = tokenizer.encode("\n\nWhat is the pass key? The pass key is", add_special_tokens=False).ids
    prefix, around = list(text_ids[:1]), length - len(needle) - len(question) - 1
    if around < 1:
        raise errors.invalid("pass-keys", f"must be at least {length - around + 1} tokens", length)
    before = int(around * depth)
    text = list(text_ids[1 : 1 + around])
    return [*prefix, *text[:before], *needle, *text[before:], *question], key


def says_key(tokenizer: Tokenizer, sequence: KvSequence, prompt: Sequence[int], key: str, at_once: int) -> bool:
    """Returns whether the key is in the greedy answer."""
    sequence.restart()
    for start in range(0, len(prompt), at_once):
        logits_RV = sequence.feed(prompt[start : start + at_once])
    answer: list[int] = []
    for _ in range(_NEW_TOKENS):
        answer.append(int(logits_RV[0].argmax()))
        logits_RV = sequence.feed(answer[-1:])
    return key in tokenizer.decode(answer)


def judge(sequences: Sequence[KvSequence], ids: Sequence[int], every: int, at_once: int) -> list[WindowSums]:
    """Returns the sums of each over every n-th token of a window. The first sequence is the reference."""
    judged = [Judged() for _ in sequences]
    for sequence in sequences:
        sequence.restart()
    for start in range(0, len(ids) - 1, at_once):
        part = ids[start : min(start + at_once, len(ids) - 1)]
        rows = [row for row in range(len(part)) if (start + row + 1) % every == 0]
        targets_T = torch.tensor([ids[start + row + 1] for row in rows], dtype=torch.int64)
        expected_TV = sequences[0].feed(part, rows)
        for sequence, sums in zip(sequences, judged, strict=True):
            sums.add(expected_TV, expected_TV if sequence is sequences[0] else sequence.feed(part, rows), targets_T)
    return [sums.sums() for sums in judged]


def greedy_matches(sequences: Sequence[KvSequence], prompt: Sequence[int], new_tokens: int, at_once: int) -> list[GreedyMatch]:
    """Compares each one's likeliest tokens with the first one's greedy answer, which it reads.

    Up to the first difference it has read what it would have written itself.
    """
    answer = [_read(sequences[0], prompt, at_once)]
    while len(answer) < new_tokens:
        answer.append(int(sequences[0].feed(answer[-1:])[0].argmax()))
    return [_match(sequence, prompt, answer, at_once) for sequence in sequences]


def _match(sequence: KvSequence, prompt: Sequence[int], answer: Sequence[int], at_once: int) -> GreedyMatch:
    found = [_read(sequence, prompt, at_once)]
    for start in range(0, len(answer) - 1, at_once):
        part = answer[start : min(start + at_once, len(answer) - 1)]
        found += sequence.feed(part, range(len(part))).argmax(1).tolist()
    equal = [a == b for a, b in zip(found, answer, strict=True)]
    return GreedyMatch([*equal, False].index(False), sum(equal))


def _read(sequence: KvSequence, prompt: Sequence[int], at_once: int) -> int:
    """Returns the likeliest token after a prompt."""
    sequence.restart()
    for start in range(0, len(prompt), at_once):
        logits_RV = sequence.feed(prompt[start : start + at_once])
    return int(logits_RV[0].argmax())
