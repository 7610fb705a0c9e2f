"""Random draws whose tokens stay on the device.

Legend: S rows of the batch, R rows drawn at random among them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.sampling.sampler import draws_of
from ryzanstein.worker.sampling.sending import sent
from ryzanstein.worker.sampling.truncation import drawn


def draw(logits_SV: Tensor, rows: Mapping[int, SampleRow]) -> None:
    """Leaves one token of each of these rows finite, in place: the one that `sample` returns for such a row.

    The rows are sampled at random and adjust no logits. One without finite logits is left as it is. The host never
    waits for the device: it does not see the tokens.
    """
    if not rows:
        return
    index_R = sent([*rows], logits_SV.device)
    logits_RV = logits_SV.index_select(0, index_R).float()
    token_R1 = drawn(logits_RV, draws_of([*rows.values()], logits_SV.shape[1])).unsqueeze(1).clamp_(max=logits_SV.shape[1] - 1)
    only_RV = torch.full_like(logits_RV, -torch.inf).scatter_(1, token_R1, 0.0)
    sound_R1 = logits_RV.amax(dim=1, keepdim=True).isfinite()
    logits_SV.index_copy_(0, index_R, torch.where(sound_R1, only_RV, logits_RV).to(logits_SV.dtype))
