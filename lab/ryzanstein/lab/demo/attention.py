"""Causal attention for training on a CPU: plain matrix products in bfloat16, backward included.

At the sizes of the demo model the fused CPU kernel takes three times as long backward, and
transformers' own plain attention a third more, because it widens the scores to float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "ryzanstein_demo_training"


def causal_attention(
    module: nn.Module, query_RHTD: Tensor, key_RKTD: Tensor, value_RKTD: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Returns causal self-attention of R rows, [R, T, H, D].

    Padding is at the end, so the causal mask alone hides it.
    """
    num_rows, num_heads, num_tokens, _head_dim = query_RHTD.shape
    query_NTD = query_RHTD.flatten(0, 1).bfloat16()
    key_NTD, value_NTD = (
        shared.repeat_interleave(num_heads // shared.shape[1], dim=1).flatten(0, 1).bfloat16()
        for shared in (key_RKTD, value_RKTD)
    )
    later_TT = torch.full((num_tokens, num_tokens), -torch.inf, dtype=torch.bfloat16).triu(1)
    with torch.autocast("cpu", enabled=False):
        scores_NTT = torch.baddbmm(later_TT, query_NTD, key_NTD.transpose(1, 2), alpha=scaling)
        mixed_NTD = torch.bmm(scores_NTT.softmax(-1), value_NTD)
    return mixed_NTD.view(num_rows, num_heads, num_tokens, -1).transpose(1, 2).contiguous(), None


def use_training_attention(model: Any) -> None:
    """Makes a transformers model use `causal_attention`."""
    AttentionInterface.register(NAME, causal_attention)
    model.set_attn_implementation(NAME)
