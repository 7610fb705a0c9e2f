"""Architectures with short convolutions, delta rules or state spaces."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.checkpoints.gguf.dialects.deltas import DeltaRule
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.experts import Experts, LfmExperts, NemotronExperts
from ryzanstein.worker.checkpoints.gguf.dialects.heads import (
    ConvolvedHeads,
)
from ryzanstein.worker.checkpoints.gguf.dialects.rows.common import (
    PARTLY,
    SILU,
    SPARSE,
)
from ryzanstein.worker.checkpoints.gguf.dialects.rows.plain import GRANITE
from ryzanstein.worker.checkpoints.gguf.dialects.shapes import (
    GraniteExperts,
    MixedHeads,
    StateSpaces,
)

LFM2 = Dialect(
    "lfm2",
    "lfm2",
    "Lfm2ForCausalLM",
    fixed={"block_auto_adjust_ff_dim": False, "conv_bias": False},
    heads=ConvolvedHeads(),
    final_norm="token_embd_norm",
    each_layer="attn_norm.weight",
)
LFM2_MOE = replace(
    LFM2,
    name="lfm2moe",
    model_type="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    fixed={"conv_bias": False},
    features=(Experts("moe_intermediate_size"), LfmExperts()),
)
GRANITE_HYBRID = replace(
    GRANITE,
    name="granitehybrid",
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    fixed={**SILU, "mamba_proj_bias": False},
    present={},
    split_gate=True,
    heads=MixedHeads(turned=True),
    each_layer="attn_norm.weight",
    features=(GraniteExperts(), StateSpaces()),
)
FALCON_H1 = Dialect(
    "falcon-h1",
    "falcon_h1",
    "FalconH1ForCausalLM",
    fixed={
        **SILU,
        "attention_bias": False,
        "mamba_proj_bias": False,
        "projectors_bias": False,
        "mamba_norm_before_gate": False,
    },
    present={"mlp_bias": "blk.0.ffn_up.bias", "mamba_rms_norm": "blk.0.ssm_norm.weight"},
    features=(StateSpaces(width="mamba_d_ssm"),),
)
NEMOTRON_H = Dialect(
    "nemotron_h",
    "nemotron_h",
    "NemotronHForCausalLM",
    own_widths=True,
    fixed={"hidden_act": "relu2", "use_bias": False, "mlp_bias": False},
    mlp_norm="attn_norm",
    each_layer="attn_norm.weight",
    heads=MixedHeads(),
    features=(StateSpaces("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "mamba_head_dim"),),
)
NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    sparse=True,
    heads=MixedHeads(wide="moe"),
    features=(*NEMOTRON_H.features, Experts("moe_intermediate_size"), NemotronExperts()),
)
QWEN35 = Dialect(
    "qwen35",
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    tiled=True,
    plus_one=True,
    fixed={**SILU, "attention_bias": False},
    mlp_norm="post_attention_norm",
    each_layer="attn_norm.weight",
    heads=PARTLY,
    features=(DeltaRule(),),
)
QWEN35_MOE = replace(
    QWEN35,
    name="qwen35moe",
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    own_widths=True,
    fixed={**QWEN35.fixed, "intermediate_size": 1},
    features=(DeltaRule(), Experts("moe_intermediate_size", shared=True)),
)
QWEN3_NEXT = replace(
    QWEN35,
    name="qwen3next",
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    tiled=False,
    fixed={**QWEN35.fixed, **SPARSE, "norm_topk_prob": True},
    features=(DeltaRule(sections=False), Experts("moe_intermediate_size", shared=True)),
)
