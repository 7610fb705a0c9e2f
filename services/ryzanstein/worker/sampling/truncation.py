"""Random draws with torch's operators: token weights, bounds of top-k, top-p and min-p, draws.

A bound is a logit, so it keeps all tokens equal to the last one that is kept: which tokens survive
never depends on how a sort orders ties.

Nothing waits for a GPU.

Legend: R rows, V vocabulary, W the likeliest tokens that are examined, descending.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.draw import Draw
from ryzanstein.worker.sampling.sending import sent

_WIDTH = 512  # the nucleus nearly always fits; otherwise the whole row is sorted
_CACHED = 16 * 1024  # numbers that fit a core's cache together with their intermediate results
_SERIES = (  # ln(2)^k / k!, as in draw.c: a library's logarithm may differ in its last bit
    *((1.0, 0.6931471805599453), (0.24022650695910072, 0.05550410866482158)),
    *((0.009618129107628477, 0.0013333558146428443), (0.0001540353039338161, 1.5252733804059841e-5)),
    *((1.321548679014431e-6, 1.01780860092397e-7), (7.054911620801123e-9, 4.4455382718708116e-10)),
)


def drawn(logits_RV: Tensor, draws_R: Sequence[Draw]) -> Tensor:
    """Returns the token of each row, [R].

    It is the token at which the sum of weights, in vocabulary order, exceeds a uniform part of
    their total. The greatest logit of each row must be finite. `draws_R` are parallel to the rows.
    """
    weight_RV = weights(logits_RV, draws_R)
    least_R1 = _column([draw.least for draw in draws_R], logits_RV)
    uniform_R1 = _column([draw.uniform for draw in draws_R], logits_RV)
    cut_RV = (logits_RV < floors(logits_RV, weight_RV, draws_R).unsqueeze(1)) | (weight_RV < least_R1)
    sums_RV = weight_RV.masked_fill_(cut_RV, 0).cumsum(dim=1)
    return torch.searchsorted(sums_RV, (uniform_R1 * sums_RV[:, -1:]).long(), right=True).squeeze(1)


def weights(logits_RV: Tensor, draws_R: Sequence[Draw]) -> Tensor:
    """Returns 2^(bits + (logit - greatest logit) * rate) as whole numbers, [R, V] in int64.

    Each operation rounds separately, as in C.
    """
    logits_RV, rate_R1 = logits_RV.double(), _column([draw.rate for draw in draws_R], logits_RV)
    power_RV = (logits_RV - logits_RV.amax(dim=1, keepdim=True)).mul_(rate_R1).clamp_(min=-64)
    size = _CACHED if power_RV.device.type == "cpu" else power_RV.numel()
    parts = [_rounded(power, draws_R[0].bits) for power in torch.split(power_RV.view(-1), size)]
    return torch.cat(parts).view(power_RV.shape)


def _rounded(power: Tensor, bits: int) -> Tensor:
    whole = power.round()
    exponent = whole.long().add_(1023 + bits)
    return _series(power - whole).mul_((exponent << 52).view(torch.float64)).round_().long()


def _series(f: Tensor) -> Tensor:
    """Returns 2^f. Neighbouring terms are added first, as in draw.c."""
    sums = [even + odd * f for even, odd in _SERIES]
    while len(sums) > 1:
        f = f * f
        pairs = [even + odd * f for even, odd in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + sums[2 * len(pairs) :]
    return sums[0]


def floors(logits_RV: Tensor, weight_RV: Tensor, draws_R: Sequence[Draw]) -> Tensor:
    """Returns the smallest logit of each row that may be drawn, [R]; minus infinity for all.

    top-k applies first, then top-p to what it leaves.
    """
    if not any(draw.top_k > 0 or draw.top_p < 1 for draw in draws_R):
        return logits_RV.new_full((len(logits_RV),), -torch.inf)
    vocab_size = logits_RV.shape[1]
    width = min(_WIDTH, vocab_size)
    if all(0 < draw.top_k <= width or (draw.top_p == 1 and draw.top_k == 0) for draw in draws_R):
        return _floors(logits_RV, weight_RV, draws_R, width)[0]
    if logits_RV.device.type != "cpu":  # there a sort takes less time than to wait for whether it is needed
        return _floors(logits_RV, weight_RV, draws_R, vocab_size)[0]
    floor_R, open_R = _floors(logits_RV, weight_RV, draws_R, width)
    if rows := open_R.nonzero().flatten().tolist():
        floor_R[rows], _ = _floors(logits_RV[rows], weight_RV[rows], [draws_R[r] for r in rows], vocab_size)
    return floor_R


def _floors(logits_RV: Tensor, weight_RV: Tensor, draws_R: Sequence[Draw], width: int) -> tuple[Tensor, Tensor]:
    """Returns each row's bound, and whether the `width` likeliest tokens were too few for it.

    They are enough for a top-k of at most `width`, whatever top-p: all others that it leaves are equal to the last of them.
    """
    top_k_R1 = sent([draw.top_k for draw in draws_R], logits_RV.device).unsqueeze(1)
    top_p_R1 = _column([draw.top_p for draw in draws_R], logits_RV)
    best_RW, token_RW = logits_RV.topk(width, dim=1)
    kth_R1 = best_RW.gather(1, top_k_R1.clamp(1, width) - 1).masked_fill(top_k_R1 == 0, -torch.inf)
    total_R1 = weight_RV.masked_fill(logits_RV < kth_R1, 0).sum(dim=1, keepdim=True)
    needed_R1 = (top_p_R1 * total_R1).ceil_().long().clamp_(min=1)
    last_R1 = (weight_RV.gather(1, token_RW).cumsum(dim=1) < needed_R1).sum(dim=1, keepdim=True)
    nucleus_R1 = torch.maximum(kth_R1, best_RW.gather(1, last_R1.clamp(max=width - 1)))
    open_R1 = (top_k_R1 > width) | ((top_p_R1 < 1) & (last_R1 >= width))
    return torch.where(top_p_R1 < 1, nucleus_R1, kth_R1).squeeze(1), open_R1.squeeze(1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Returns the values as [R, 1] in float64, which holds weights exactly."""
    return sent([float(value) for value in values], like.device).unsqueeze(1)
