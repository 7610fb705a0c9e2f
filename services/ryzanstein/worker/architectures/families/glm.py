"""GLM 4 of Z.ai: half of each head rotates, gate and up are one tensor; with experts from GLM 4.5 on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.deepseek import (
    DEEPSEEK_V3,
    corrected_routing,
    sparse_after,
    with_experts,
    with_latents,
    without_further_layers,
)
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES, QK_NORM_NAMES
from ryzanstein.worker.architectures.rotary.config import rotary_table
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import excerpt

_MLPS = ("dense", "sparse")
_FUSED_MLP = replace(LLAMA_NAMES, gate="mlp.gate_up_proj", up="mlp.gate_up_proj")
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1.5625e-07,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def _glm4_moe(spec: DecoderSpec, values: Values) -> DecoderSpec:
    spec = without_further_layers(spec, values)
    return sparse_after(spec, values, corrected_routing(values))


def _glm4_moe_lite(spec: DecoderSpec, values: Values) -> DecoderSpec:
    table = rotary_table(values)
    if table.number("partial_rotary_factor", 1.0) != 1:
        raise table.error("partial_rotary_factor", "is not supported, only 1: all numbers beside the latent rotate")
    sparse = _sparse_layers(values, spec.num_layers)
    return with_experts(with_latents(without_further_layers(spec, values), values), values, corrected_routing(values), sparse)


def _sparse_layers(values: Values, num_layers: int) -> list[bool]:
    """Returns which layers have experts: all but the first, unless `mlp_layer_types` lists them."""
    kinds = values.per_layer("mlp_layer_types", num_layers)
    if kinds is None:
        return [index > 0 for index in range(num_layers)]
    unknown = next((kind for kind in kinds if kind not in _MLPS), None)
    if unknown is not None or len(kinds) > num_layers:
        what = (
            f"must have {num_layers} entries" if unknown is None else f"{excerpt(unknown)} is not supported, only {list(_MLPS)}"
        )
        raise values.error("mlp_layer_types", what)
    return [kind == "sparse" for kind in kinds]


GLM = Architecture(
    model_type="glm",
    title="GLM 4 9B of 2024, GLM Edge",
    names=_FUSED_MLP,
    choices=Choices(interleaved=True, rotated="factor", qkv_bias="attention_bias"),
    defaults=_DEFAULTS,
)
GLM4 = Architecture(
    model_type="glm4",
    title="GLM 4 and Z1 of 2025",
    names=replace(
        _FUSED_MLP,
        attention_post_norm="post_self_attn_layernorm",
        mlp_norm="post_attention_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    ),
    choices=GLM.choices,
    defaults=_DEFAULTS,
)
GLM4_MOE = Architecture(
    model_type="glm4_moe",
    title="GLM 4.5, 4.6 and 4.7",
    names=replace(
        QK_NORM_NAMES,
        router=DEEPSEEK_V3.names.router,
        router_correction=DEEPSEEK_V3.names.router_correction,
        expert=DEEPSEEK_V3.names.expert,
        shared_expert=DEEPSEEK_V3.names.shared_expert,
    ),
    choices=Choices(rotated="factor", qk_norm="shared", qk_normed="use_qk_norm", qkv_bias="attention_bias"),
    renamed={"num_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_mtp_layers": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    refine=_glm4_moe,
    refined=DEEPSEEK_V3.refined,
)
GLM4_MOE_LITE = Architecture(
    model_type="glm4_moe_lite",
    title="GLM 4.7 Flash",
    names=DEEPSEEK_V3.names,
    choices=DEEPSEEK_V3.choices,
    renamed=DEEPSEEK_V3.renamed,
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "num_mtp_layers": 1,
        "rope_interleave": True,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "num_experts": 64,
    },
    refine=_glm4_moe_lite,
    refined="dense layers where `mlp_layer_types`, `num_nextn_predict_layers` further layers not read",
)
