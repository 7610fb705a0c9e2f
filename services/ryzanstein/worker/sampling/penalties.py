"""Adjusts the model's logits for a request before the draw: penalties, biases, bans.

The work is sparse: only affected tokens are touched, and they are counted incrementally. Token ids
outside the vocabulary are ignored.

Legend: S rows, V vocabulary, J (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import SampleRow, TokenTally


def adjust(logits_SV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Adjusts the logits in place, and returns them. A logit of minus infinity stays as it is.

    Repetition, presence and frequency penalty, logit bias, allowed tokens and bans are applied in
    this order.
    """
    _repetition(logits_SV, rows)
    _presence_and_frequency(logits_SV, rows)
    _bias(logits_SV, rows)
    _allow(logits_SV, rows)
    _ban(logits_SV, rows)
    return logits_SV


def _repetition(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies the repetition penalty to tokens of the prompt and the answer (CTRL 2019).

    Positive logits are divided by the penalty, negative ones are multiplied.
    """
    penalized = [(s, row) for s, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    flats, penalties = [], []
    for s, row in penalized:
        ids, _ = _seen(row, logits_SV.shape[1]).now()
        flats.append(ids + s * logits_SV.shape[1])
        penalties.append(np.full(len(ids), row.sampling.repetition_penalty, np.float32))
    if not flats:
        return
    index_J, penalty_J = _joined(flats, logits_SV), _joined(penalties, logits_SV)
    values_J = logits_SV.view(-1).index_select(0, index_J)
    penalized_J = torch.where(values_J < 0, values_J * penalty_J, values_J / penalty_J)
    logits_SV.view(-1).scatter_(0, index_J, penalized_J)


def _presence_and_frequency(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Subtracts presence once, and frequency per occurrence in the answer (OpenAI API)."""
    flats, penalties = [], []
    for s, row in enumerate(rows):
        presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
        if presence != 0 or frequency != 0:
            ids, counts = _tally_of(row, logits_SV.shape[1]).now()
            flats.append(ids + s * logits_SV.shape[1])
            penalties.append(np.float32(presence) + np.float32(frequency) * counts.astype(np.float32))
    if flats:
        index_J = _joined(flats, logits_SV)
        values_J = logits_SV.view(-1).index_select(0, index_J)
        logits_SV.view(-1).scatter_(0, index_J, values_J - _joined(penalties, logits_SV))


def _seen(row: SampleRow, vocab_size: int) -> TokenTally:
    if row.seen is None:
        row.seen = TokenTally(row.prompt_ids, row.generated_ids, vocab_size)
    return row.seen


def _tally_of(row: SampleRow, vocab_size: int) -> TokenTally:
    if row.tally is None:
        row.tally = TokenTally((), row.generated_ids, vocab_size)
    return row.tally


def _bias(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Adds each row's biases. A token that is listed twice gets both."""
    size = logits_SV.shape[1]
    biases = [
        (s * size + token, bias) for s, row in enumerate(rows) for token, bias in row.sampling.logit_bias if 0 <= token < size
    ]
    if biases:
        flat, values = zip(*biases, strict=True)
        index_J = torch.tensor(flat, device=logits_SV.device)
        logits_SV.view(-1).index_put_((index_J,), logits_SV.new_tensor(values), accumulate=True)


def _allow(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Leaves each row with `allowed_ids` only these."""
    size = logits_SV.shape[1]
    for s, row in enumerate(rows):
        if row.allowed_ids and row.constraint is None:
            kept = torch.tensor([token for token in row.allowed_ids if 0 <= token < size], device=logits_SV.device)
            values = logits_SV[s, kept]
            logits_SV[s].fill_(-torch.inf)
            logits_SV[s, kept] = values


def _ban(logits_SV: Tensor, rows: Sequence[SampleRow]) -> None:
    size = logits_SV.shape[1]
    free = ((s, row) for s, row in enumerate(rows) if row.constraint is None)
    banned = [s * size + token for s, row in free for token in row.banned_ids if 0 <= token < size]
    if banned:
        logits_SV.view(-1)[torch.tensor(banned, device=logits_SV.device)] = -torch.inf


def _joined(arrays: Sequence[npt.NDArray[Any]], logits_SV: Tensor) -> Tensor:
    """Returns the arrays of all rows, joined, on the logits' device."""
    return torch.from_numpy(np.concatenate(arrays)).to(logits_SV.device)
