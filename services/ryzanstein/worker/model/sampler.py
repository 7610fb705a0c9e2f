"""From logits to tokens, a whole batch at once, on rank 0. Every row is computed as if it were alone.

Legend: S rows of the step, R rows drawn at random among them, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import SampledToken, SampleRow, SequencesFailed
from ryzanstein.worker.model.penalties import adjusted
from ryzanstein.worker.model.philox import uniform
from ryzanstein.worker.model.truncation import floors


def sample(logits_SV: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token for each row of float32 logits. Raises SequencesFailed where a row is not finite."""
    refuse_invalid(logits_SV.max(dim=1).values)
    scores_SV = adjusted(logits_SV, rows)
    token_S = scores_SV.argmax(dim=1)
    random = [s for s, row in enumerate(rows) if row.sampling.temperature > 0]
    if random:
        token_S[random] = _draw(scores_SV[random], [rows[s] for s in random])
    return _with_logprobs(logits_SV, token_S, rows)


def refuse_invalid(best_S: Tensor) -> None:
    """Raises SequencesFailed for rows whose greatest logit is not a number that can be compared (NaN spreads into it)."""
    rows = [s for s, best in enumerate(best_S.tolist()) if not math.isfinite(best)]
    if rows:
        raise SequencesFailed(dict.fromkeys(rows, "the model's logits are not finite"))


def _draw(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Inverts the cumulative distribution in vocabulary order at the row's uniform number; float64 throughout."""
    sampling = [row.sampling for row in rows]
    temperature_R1 = logits_RV.new_tensor([params.temperature for params in sampling], dtype=torch.float64).unsqueeze(1)
    scores_RV = (logits_RV.double() - logits_RV.amax(dim=1, keepdim=True)) / temperature_R1
    floor_R1 = floors(scores_RV, sampling).unsqueeze(1)
    cumulative_RV = scores_RV.masked_fill_(scores_RV < floor_R1, -torch.inf).exp_().cumsum(dim=1)
    uniform_R1 = _uniform(rows).to(logits_RV.device).unsqueeze(1)
    return torch.searchsorted(cumulative_RV, uniform_R1 * cumulative_RV[:, -1:], right=True).squeeze(1)


def _uniform(rows: Sequence[SampleRow]) -> Tensor:
    seeds = [row.sampling.seed for row in rows]
    if None in seeds:
        raise ValueError("a row that is drawn at random needs a seed")
    drawn = uniform([seed for seed in seeds if seed is not None], [row.choice for row in rows], [row.index for row in rows])
    return torch.from_numpy(drawn)


def _with_logprobs(logits_SV: Tensor, token_S: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Natural log probabilities of the model itself, for the rows that ask for them."""
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
