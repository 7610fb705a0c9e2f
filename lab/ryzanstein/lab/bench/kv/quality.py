"""Perplexity and greedy answers of all options beside the reference, on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ryzanstein.lab.bench.kv.sequence import KvSequence
from ryzanstein.lab.bench.quality.document import GreedyMatch, WindowSums
from ryzanstein.lab.bench.quality.scoring import Judged


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
