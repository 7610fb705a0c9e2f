"""What a request adds to the model's logits before anything is drawn: penalties, biases, bans. Sparse: only tokens concerned.

Token ids outside the vocabulary name no logit and are passed over.

Legend: S rows, V vocabulary, J (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import SampleRow

Integers = npt.NDArray[np.int64]


def adjusted(logits_SV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Logits after repetition, presence and frequency penalty, logit bias and bans, in this order. The argument stays."""
    adjusted_SV = logits_SV.clone()
    _repetition(adjusted_SV, rows)
    _presence_and_frequency(adjusted_SV, rows)
    _bias(adjusted_SV, rows)
    _ban(adjusted_SV, rows)
    return adjusted_SV


def _repetition(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Positive logits of tokens seen in prompt or answer are divided by the penalty, negative ones multiplied (CTRL 2019)."""
    seen = [(s, chain(row.prompt_ids, row.generated_ids)) for s, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    flat_J, _ = _count(seen, logits_SV.shape[1])
    if len(flat_J) == 0:
        return
    penalty_J = _of_rows([row.sampling.repetition_penalty for row in rows], flat_J, logits_SV)
    index_J = torch.from_numpy(flat_J).to(logits_SV.device)
    values_J = logits_SV.view(-1)[index_J]
    logits_SV.view(-1)[index_J] = torch.where(values_J < 0, values_J * penalty_J, values_J / penalty_J)


def _presence_and_frequency(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Subtracts presence once and frequency for each time that the answer has the token (OpenAI API)."""
    repeated = [
        (s, row.generated_ids)
        for s, row in enumerate(rows)
        if row.sampling.presence_penalty != 0 or row.sampling.frequency_penalty != 0
    ]
    flat_J, count_J = _count(repeated, logits_SV.shape[1])
    if len(flat_J) == 0:
        return
    presence_J = _of_rows([row.sampling.presence_penalty for row in rows], flat_J, logits_SV)
    frequency_J = _of_rows([row.sampling.frequency_penalty for row in rows], flat_J, logits_SV)
    counts_J = torch.from_numpy(count_J).to(logits_SV.device)
    logits_SV.view(-1)[torch.from_numpy(flat_J).to(logits_SV.device)] -= presence_J + frequency_J * counts_J


def _bias(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Adds each row's bias; a token that is listed twice gets both."""
    size = logits_SV.shape[1]
    biases = [
        (s * size + token, bias) for s, row in enumerate(rows) for token, bias in row.sampling.logit_bias if 0 <= token < size
    ]
    if biases:
        flat, values = zip(*biases, strict=True)
        index_J = torch.tensor(flat, device=logits_SV.device)
        logits_SV.view(-1).index_put_((index_J,), logits_SV.new_tensor(values), accumulate=True)


def _ban(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    flat_J, _ = _count([(s, row.banned_ids) for s, row in enumerate(rows) if row.banned_ids], logits_SV.shape[1])
    logits_SV.view(-1)[torch.from_numpy(flat_J).to(logits_SV.device)] = -torch.inf


def _count(tokens: Iterable[tuple[int, Iterable[int]]], vocab_size: int) -> tuple[Integers, Integers]:
    """The distinct (row, token) pairs as indices into flattened logits, and how often each occurs."""
    flats = [np.zeros(0, np.int64)]
    for s, token_ids in tokens:
        ids = np.fromiter(token_ids, np.int64)
        flats.append(ids[(ids >= 0) & (ids < vocab_size)] + s * vocab_size)
    return np.unique(np.concatenate(flats), return_counts=True)


def _of_rows(values: Sequence[float], flat_J: Integers, logits_SV: Tensor) -> Tensor:
    """Each pair's row's value."""
    values_J = np.array(values, np.float32)[flat_J // logits_SV.shape[1]]
    return torch.from_numpy(values_J).to(logits_SV.device)
