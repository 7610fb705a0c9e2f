"""What is added to scores before torch's softmax: minus infinity for hidden keys, and a bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.model.alibi import AlibiBias
from ryzanstein.worker.model.inputs.layout import CacheLayout, Integers
from ryzanstein.worker.model.inputs.paged import SeenKeys


@dataclass(frozen=True, slots=True)
class ScoreMasks:
    """A maker of masks in the dtype of scores. `bias` is added to the scores of every layer."""

    layout: CacheLayout
    dtype: torch.dtype
    bias: AlibiBias | None = None

    def of_sequence(self, keys: SeenKeys, s: int) -> Tensor | None:
        """Returns the mask of a sequence's new tokens, or None if they see all keys alike."""
        causal_nL = self._causal(keys, s) if keys.num_new_S[s] > 1 else None
        if self.bias is None:
            return causal_nL
        positions_L = int(keys.origin_S[s]) + torch.arange(
            int(keys.begin_S[s]), int(keys.length_S[s]), device=self.layout.device
        )
        bias_KGL = self.bias.at(positions_L)
        return bias_KGL[None] if causal_nL is None else bias_KGL.transpose(0, 1).unsqueeze(2) + causal_nL

    def of_batch(self, absent_SP: npt.NDArray[np.bool_], true_SP: Integers) -> Tensor:
        """Returns the mask of a padded batch, whose keys have the positions `true_SP`."""
        mask_SP = torch.zeros(absent_SP.shape, dtype=self.dtype, device=self.layout.device)
        mask_S11P = mask_SP.masked_fill_(self.layout.tensor(absent_SP), -torch.inf)[:, None, None]
        return mask_S11P if self.bias is None else mask_S11P + self.bias.at(self.layout.tensor(true_SP))

    def _causal(self, keys: SeenKeys, s: int) -> Tensor:
        """Returns the causal mask of a sequence's new tokens.

        Row i is the i-th of them: it sees itself and the tokens before it, within the window.
        """
        begin, length, num_new = int(keys.begin_S[s]), int(keys.length_S[s]), int(keys.num_new_S[s])
        own = length - num_new - begin  # the column of row 0's own key
        hidden_nL = torch.full((num_new, length - begin), -torch.inf, dtype=self.dtype, device=self.layout.device)
        if keys.window is None:
            return hidden_nL.triu_(own + 1)
        return hidden_nL.triu(own + 1).add_(hidden_nL.tril_(own - keys.window))
