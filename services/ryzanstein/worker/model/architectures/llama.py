"""Llama 1 to 3: RMS norm before each half of a layer, rotary positions, grouped queries, a gated MLP (Touvron et al. 2023)."""

from __future__ import annotations

from ryzanstein.worker.model.architectures.config import Architecture
from ryzanstein.worker.model.architectures.spec import WeightNames

LLAMA = Architecture(
    model_type="llama",
    names=WeightNames(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="lm_head",
        layer="model.layers.{layer}.",
        attention_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        ignored=("rotary_emb.inv_freq",),
    ),
)
