"""Dialogues as token ids, and token ids as padded batches.

Each row of a batch is one dialogue from position 0. Rows are never packed: a dialogue that follows
another one would see another user's facts, and the model could not learn what it was not told.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ryzanstein.lab.demo.dialogues import Dialogue
from ryzanstein.lab.demo.tokenizer import ASSISTANT, END, PAD, SYSTEM, USER


@dataclass(frozen=True)
class Encoded:
    """A dialogue's tokens and the half-open range of each turn's answer, end token included."""

    ids: list[int]
    answers: list[tuple[int, int]]


@dataclass(frozen=True)
class TrainingBatch:
    """Rows of equal padded length. Shapes: R rows, T tokens."""

    ids_RT: Tensor
    weights_RT: Tensor
    """The weight of each token as a target; 0 outside answers."""


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token that the vocabulary must have. Raises KeyError."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def encode(tokenizer: Tokenizer, dialogue: Dialogue) -> Encoded:
    """Returns the ids that the chat template renders.

    Special tokens split a text, so its parts are encoded one by one.
    """
    ids = _message(tokenizer, SYSTEM, dialogue.system) if dialogue.system else []
    answers = []
    for turn in dialogue.turns:
        ids += _message(tokenizer, USER, turn.user)
        start = len(ids) + 1
        ids += _message(tokenizer, ASSISTANT, turn.assistant)
        answers.append((start, len(ids)))
    return Encoded(ids, answers)


def batches(rows: list[Encoded], tokenizer: Tokenizer, max_tokens: int) -> Iterator[TrainingBatch]:
    """Yields the rows, shortest first, in batches of at most `max_tokens` tokens with padding."""
    pad = token_id(tokenizer, PAD)
    group: list[Encoded] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if group and len(row.ids) * (len(group) + 1) > max_tokens:
            yield _batch(group, pad)
            group = []
        group.append(row)
    if group:
        yield _batch(group, pad)


def _message(tokenizer: Tokenizer, role: str, content: str) -> list[int]:
    text = f"{role}{content.strip()}{END}"
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def _batch(rows: list[Encoded], pad: int) -> TrainingBatch:
    num_tokens = max(len(row.ids) for row in rows)
    ids_RT = torch.full((len(rows), num_tokens), pad)
    weights_RT = torch.zeros(len(rows), num_tokens)
    for index, row in enumerate(rows):
        ids_RT[index, : len(row.ids)] = torch.tensor(row.ids)
        for start, stop in row.answers:
            # By the root of its length: otherwise a count of 100 outweighs ten recalled names.
            weights_RT[index, start:stop] = (stop - start) ** -0.5
    return TrainingBatch(ids_RT, weights_RT)
