"""The attention used in training is the one used in serving, up to bfloat16."""

import torch
from torch import nn
from torch.nn import functional

from ryzanstein.lab.demo.attention import causal_attention


def test_training_attention_is_causal_grouped_attention() -> None:
    torch.manual_seed(0)
    query_RHTD = torch.randn(2, 8, 7, 16)
    key_RKTD, value_RKTD = torch.randn(2, 2, 4, 7, 16)
    got_RTHD, weights = causal_attention(nn.Identity(), query_RHTD, key_RKTD, value_RKTD, None, scaling=0.25)
    want_RHTD = functional.scaled_dot_product_attention(query_RHTD, key_RKTD, value_RKTD, is_causal=True, enable_gqa=True)
    assert weights is None
    torch.testing.assert_close(got_RTHD.float(), want_RHTD.transpose(1, 2), atol=0.03, rtol=0.03)
