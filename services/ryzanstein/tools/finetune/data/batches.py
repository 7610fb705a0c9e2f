"""Examples as tensors: which are in which batch, in what order, padded or packed.

Legend: N rows of a batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from ryzanstein.tools.finetune.data.chats import spans_of
from ryzanstein.tools.finetune.data.examples import Example

IGNORED = -100
_SORTED_BATCHES = 16
"""Batches whose examples are sorted by length among each other, so that little is padded."""

Row = Sequence[int]
"""Indices of the examples of a row: one, or several that are packed."""
Batch = Sequence[Row]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What of a training is decided before it begins. The same arguments give the same plan."""

    batches: Sequence[Batch]
    per_epoch: int


def planned(examples: Sequence[Example], batch: int, epochs: int, seed: int, pack_to: int | None = None) -> BatchPlan:
    """Returns all batches of all epochs. `pack_to`: rows of at most so many tokens, of several examples each."""
    lengths = [len(example.ids) for example in examples]
    batches: list[Batch] = []
    for epoch in range(epochs):
        random = Random(f"{seed} {epoch}")
        order = list(range(len(examples)))
        random.shuffle(order)
        rows = [[index] for index in order] if pack_to is None else _packed(order, lengths, pack_to)
        batches += _batched(rows, lengths, batch, random)
    return BatchPlan(batches, len(batches) // epochs)


def _packed(order: Sequence[int], lengths: Sequence[int], pack_to: int) -> list[list[int]]:
    """Returns rows: each example goes to the first of the last rows in which it fits."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        begin = max(0, len(rows) - _SORTED_BATCHES)
        fits = next((row for row in range(begin, len(rows)) if room[row] >= lengths[index]), None)
        if fits is None:
            rows.append([index])
            room.append(pack_to - lengths[index])
        else:
            rows[fits].append(index)
            room[fits] -= lengths[index]
    return rows


def _batched(rows: list[list[int]], lengths: Sequence[int], batch: int, random: Random) -> list[Batch]:
    found: list[Batch] = []
    window = batch * _SORTED_BATCHES
    for first in range(0, len(rows), window):
        some = sorted(rows[first : first + window], key=lambda row: sum(lengths[index] for index in row))
        found += [some[start : start + batch] for start in range(0, len(some), batch)]
    random.shuffle(found)
    return found


def collated(examples: Sequence[Example], batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors of a batch, [N, T]: tokens, their positions, and at each place the token that is learned there.

    Examples of one row have positions from 0 each, by which transformers tells them apart. Behind a row's end
    is padding, which no token before it sees.
    """
    rows = [[examples[index] for index in row] for row in batch]
    length = max(sum(len(example.ids) for example in row) for row in rows)
    shape = (len(rows), length)
    ids_NT, places_NT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels_NT = torch.full(shape, IGNORED)
    for number, row in enumerate(rows):
        first = 0
        for example in row:
            count = len(example.ids)
            ids_NT[number, first : first + count] = torch.tensor(example.ids)
            places_NT[number, first : first + count] = torch.arange(count)
            for place in _learned_places(example):
                labels_NT[number, first + place - 1] = example.ids[place]
            first += count
        if len(row) == 1:
            places_NT[number, first:] = torch.arange(first, length)
    tensors = {"input_ids": ids_NT, "labels": labels_NT, "shift_labels": labels_NT}
    return tensors if all(len(row) == 1 for row in rows) else tensors | {"position_ids": places_NT}


def _learned_places(example: Example) -> Iterator[int]:
    """Yields the places of the learned tokens. There is nothing that the first token could be learned from."""
    return (place for place in spans_of(example.learned) if place > 0)
