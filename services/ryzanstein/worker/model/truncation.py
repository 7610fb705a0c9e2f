"""Which tokens may be drawn: top-k, top-p and min-p as one lower bound on the score of each row.

A bound on the score keeps equals of the last token that is kept: which tokens survive never depends on how a sort orders ties.

Legend: S rows, V vocabulary, W the likeliest tokens that are looked at, descending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.generation import SamplingParams

_WIDTH = 512  # the nucleus nearly always lies within; where not, the whole row is sorted


def floors(scores_SV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """The least score that may be drawn, [S]; minus infinity where nothing is cut.

    Top-k first, top-p over what it leaves, min-p relative to the likeliest token. `scores_SV` are logits over temperature.
    """
    floor_S = torch.full((len(scores_SV),), -torch.inf, dtype=scores_SV.dtype, device=scores_SV.device)
    cut = [s for s, params in enumerate(sampling) if params.top_k > 0 or params.top_p < 1 or params.min_p > 0]
    if cut:
        floor_S[cut] = _floors(scores_SV[cut], _Cuts.of([sampling[s] for s in cut], scores_SV))
    return floor_S


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The three parameters as columns [S, 1]."""

    num_kept: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, sampling: Sequence[SamplingParams], scores_SV: Tensor) -> _Cuts:
        size, device = scores_SV.shape[1], scores_SV.device
        num_kept = torch.tensor([[min(params.top_k or size, size)] for params in sampling], device=device)
        top_p, min_p = ([[value] for value in column] for column in zip(*((p.top_p, p.min_p) for p in sampling), strict=True))
        return cls(num_kept, scores_SV.new_tensor(top_p), scores_SV.new_tensor(min_p))

    def rows(self, chosen_S: Tensor) -> _Cuts:
        return _Cuts(self.num_kept[chosen_S], self.top_p[chosen_S], self.min_p[chosen_S])


def _floors(scores_SV: Tensor, cuts: _Cuts) -> Tensor:
    size = scores_SV.shape[1]
    floor_S, open_S = _nucleus_floors(scores_SV, cuts, min(_WIDTH, size))
    if bool(open_S.any()):
        floor_S[open_S], _ = _nucleus_floors(scores_SV[open_S], cuts.rows(open_S), size)
    return torch.maximum(floor_S, scores_SV.amax(dim=1) + cuts.min_p.squeeze(1).log())


def _nucleus_floors(scores_SV: Tensor, cuts: _Cuts, width: int) -> tuple[Tensor, Tensor]:
    """The bound of top-k and top-p for each row, and whether the row's `width` likeliest tokens were too few to find it."""
    best_SW = scores_SV.topk(width, dim=1).values
    kth_S1 = best_SW.gather(1, cuts.num_kept.clamp(max=width) - 1).masked_fill(cuts.num_kept > width, -torch.inf)
    total_S1 = _log_sum(scores_SV.masked_fill(scores_SV < kth_S1, -torch.inf))
    before_SW = (best_SW - total_S1).exp().cumsum(dim=1)
    last_S1 = (before_SW < cuts.top_p).sum(dim=1, keepdim=True)
    nucleus_S1 = torch.maximum(kth_S1, best_SW.gather(1, last_S1.clamp(max=width - 1)))
    size = scores_SV.shape[1]
    open_S1 = ((cuts.num_kept > width) & (cuts.num_kept < size)) | ((cuts.top_p < 1) & (last_S1 >= width))
    floor_S1 = torch.where(cuts.top_p < 1, nucleus_S1, kth_S1)
    return floor_S1.squeeze(1), open_S1.squeeze(1) & (width < size)


def _log_sum(scores_SV: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials, [S, 1].

    torch's own has other bits for a long row that is alone, which threads share."""
    greatest_S1 = scores_SV.amax(dim=1, keepdim=True)
    return (scores_SV - greatest_S1).exp_().cumsum(dim=1)[:, -1:].log() + greatest_S1
