"""Which tokens may be drawn: top-k, top-p and min-p as one lower bound on the score of each row.

A bound on the score keeps equals of the last token that is kept: which tokens survive never depends on how a sort orders ties.

Legend: S rows, V vocabulary, W the likeliest tokens that are looked at, descending.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.generation import SamplingParams

_WIDTH = 512  # the nucleus nearly always lies within; where not, the whole row is sorted


def floors(scores_SV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """The least score that may be drawn, [S]; minus infinity where nothing is cut.

    Top-k first, top-p over what it leaves, min-p relative to the likeliest token. `scores_SV` are logits over temperature.
    """
    floor_S = torch.full((len(scores_SV),), -torch.inf, dtype=scores_SV.dtype, device=scores_SV.device)
    for s, params in enumerate(sampling):
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            floor_S[s] = _floor(scores_SV[s], params)
    return floor_S


def _floor(scores_V: Tensor, params: SamplingParams) -> Tensor:
    size = len(scores_V)
    num_kept = min(params.top_k or size, size)
    found = _nucleus_floor(scores_V, num_kept, params.top_p, min(_WIDTH, size))
    if found is None:
        found = _nucleus_floor(scores_V, num_kept, params.top_p, size)
    assert found is not None
    if params.min_p == 0:
        return found
    return torch.maximum(found, scores_V.max() + torch.tensor(params.min_p, dtype=scores_V.dtype).log())


def _nucleus_floor(scores_V: Tensor, num_kept: int, top_p: float, width: int) -> Tensor | None:
    """The bound of top-k and top-p, or None when the `width` likeliest tokens do not reach it."""
    best_W = scores_V.topk(width).values
    kth = best_W[num_kept - 1] if num_kept <= width else scores_V.new_tensor(-torch.inf)
    if num_kept > width and num_kept < len(scores_V):
        return None
    if top_p >= 1:
        return kth
    total = torch.where(scores_V >= kth, scores_V, -torch.inf).logsumexp(dim=0)
    before_W = (best_W - total).exp().cumsum(dim=0)
    num_nucleus = int((before_W < top_p).sum()) + 1
    if num_nucleus > width:
        return None if width < len(scores_V) else kth
    return torch.maximum(kth, best_W[num_nucleus - 1])
