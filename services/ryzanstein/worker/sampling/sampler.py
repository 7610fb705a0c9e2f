"""Turns logits into tokens on rank 0, a whole batch at once.

Every row is computed as if it were alone. Greedy rows take the likeliest token.

Legend: S rows of the step, R rows drawn at random among them, V vocabulary, W words of 32 of its tokens' bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import SampledToken, SampleRow, SequencesFailed, adjusts_logits
from ryzanstein.worker.kernels.functions.draw import Draw, uniform
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.sampling.penalties import adjust
from ryzanstein.worker.sampling.truncation import drawn

Likeliest = Callable[[Tensor], tuple[Tensor, Tensor]]


def new_likeliest(kernels: NativeKernels | None) -> Likeliest:
    """Returns a function that finds the greatest logit of each row of logits [S, V].

    It also returns the lowest token that has it. The greatest logit is NaN if the row contains one.
    Our own kernel is used if there is one: torch takes 0.5 ms for a row of 131,072.
    """
    return _likeliest if kernels is None else kernels.sampling.greatest


def _likeliest(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    best_S, token_S = logits_SV.max(dim=1)
    return best_S, token_S


Bits = npt.NDArray[np.uint32]


def sample(
    logits_SV: Tensor, rows: Sequence[SampleRow], kernels: NativeKernels | None = None, allowed_SW: Bits | None = None
) -> list[SampledToken]:
    """Returns one token for each row of float32 logits, the same with kernels as with torch.

    It is one of `allowed_SW`, of which each row has some; None: any.

    Raises SequencesFailed if a row is not finite or none of its tokens may be drawn.
    """
    refuse_invalid(logits_SV.amax(dim=1).tolist())
    scores_SV = logits_SV.clone() if allowed_SW is None else restricted(logits_SV, allowed_SW, kernels)
    if any(adjusts_logits(row) for row in rows):
        adjust(scores_SV, rows)
    best_S, token_S = new_likeliest(kernels)(scores_SV)
    refuse_invalid(best_S.tolist())
    random = [s for s, row in enumerate(rows) if row.sampling.temperature > 0]
    if random:
        draws_R = draws_of([rows[s] for s in random], scores_SV.shape[1], random)
        token_S[random] = drawn(scores_SV[random], draws_R) if kernels is None else kernels.sampling.draw(scores_SV, draws_R)
    return _with_logprobs(logits_SV, token_S, rows)


def restricted(logits_SV: Tensor, allowed_SW: Bits, kernels: NativeKernels | None = None) -> Tensor:
    """Returns a copy of the logits, minus infinity where a token's bit is not set."""
    if kernels is not None:
        return kernels.sampling.restrict(logits_SV, torch.from_numpy(allowed_SW.view(np.int32)))
    flags_SV = np.unpackbits(allowed_SW.view(np.uint8), axis=1, bitorder="little", count=logits_SV.shape[1])
    return torch.where(torch.from_numpy(flags_SV.view(np.bool_)).to(logits_SV.device), logits_SV, -torch.inf)


def scores(logits_PV: Tensor, targets: Sequence[int], num_top: int, first_row: int) -> list[SampledToken]:
    """Returns how likely each row's target is, with the `num_top` likeliest tokens beside it.

    Raises SequencesFailed if a row is not finite; `first_row` is the number of the first.
    """
    refuse_invalid(logits_PV.amax(dim=1).tolist(), first_row)
    logprobs_PV = logits_PV.log_softmax(dim=1)
    own_P = logprobs_PV.gather(1, torch.tensor(targets, device=logits_PV.device).unsqueeze(1)).squeeze(1).tolist()
    top = logprobs_PV.topk(min(num_top, logits_PV.shape[1]), dim=1)
    rows = zip(targets, own_P, top.indices.tolist(), top.values.tolist(), strict=True)
    return [SampledToken(target, own, tuple(zip(ids, values, strict=True))) for target, own, ids, values in rows]


def hidden_states(hidden_PE: Tensor, first_row: int) -> list[SampledToken]:
    """Returns rows of hidden states as numbers in single precision.

    Raises SequencesFailed if a row is not finite; `first_row` is the number of the first.
    """
    refuse_invalid(hidden_PE.abs().amax(dim=1).tolist(), first_row)
    return [SampledToken(0, hidden=row_E.tobytes()) for row_E in hidden_PE.float().cpu().numpy()]


def refuse_invalid(best: Sequence[float], first_row: int = 0) -> None:
    """Raises SequencesFailed for rows whose greatest logit is not finite (NaN spreads into it)."""
    if not all(map(math.isfinite, best)):
        rows = [first_row + s for s, logit in enumerate(best) if not math.isfinite(logit)]
        raise SequencesFailed(dict.fromkeys(rows, "the model's logits are not finite"))


def draws_of(rows: Sequence[SampleRow], vocab_size: int, places: Sequence[int] = ()) -> list[Draw]:
    """Returns the draws of rows with a temperature. `places`: where they are in the batch; one after another if not given."""
    places = places or range(len(rows))
    return [Draw.of(s, row.sampling, vocab_size, u) for s, row, u in zip(places, rows, _uniform(rows), strict=True)]


def _uniform(rows: Sequence[SampleRow]) -> list[float]:
    seeds = [row.sampling.seed for row in rows]
    if None in seeds:
        raise ValueError("a row that is sampled at random needs a seed")
    known = [seed for seed in seeds if seed is not None]
    return [float(number) for number in uniform(known, [row.choice for row in rows], [row.index for row in rows])]


def _with_logprobs(logits_SV: Tensor, token_S: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Returns the tokens, with the model's natural log probabilities for rows that request them."""
    tokens = [SampledToken(token_id) for token_id in token_S.tolist()]
    asked = [s for s, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not asked:
        return tokens
    num_top = [rows[s].sampling.logprobs or 0 for s in asked]
    logprobs_RV = logits_SV[asked].log_softmax(dim=1)
    own_R = logprobs_RV.gather(1, token_S[asked].unsqueeze(1)).squeeze(1).tolist()
    top = logprobs_RV.topk(min(max(num_top), logits_SV.shape[1]), dim=1)
    for s, count, own, values, ids in zip(asked, num_top, own_R, top.values.tolist(), top.indices.tolist(), strict=True):
        tokens[s] = SampledToken(tokens[s].token_id, own, tuple(zip(ids[:count], values[:count], strict=True)))
    return tokens
