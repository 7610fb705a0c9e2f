"""What several rows have: keys of config.json that a file does not say, and kinds of heads."""

from __future__ import annotations

from ryzanstein.worker.checkpoints.gguf.dialects.heads import (
    PartlyRotatedHeads,
    WholeHeads,
)

QUERY_BIAS = "blk.0.attn_q.bias"
ATTENTION_BIAS = {"attention_bias": QUERY_BIAS}
SILU = {"hidden_act": "silu"}
TANH_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
UNTIED = {"tie_word_embeddings": False}  # llama.cpp needs a head
SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
SQUARED = {"hidden_act": "relu2"}
SQUARE, PARTLY = WholeHeads(square=True), PartlyRotatedHeads(square=False)
