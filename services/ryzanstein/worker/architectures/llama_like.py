"""Llama and the architectures that share its layout of weights.

They have a norm before each half of a layer, rotary positions, grouped queries and a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.rotary_config import rotary_kind, rotary_table
from ryzanstein.worker.architectures.spec import DecoderSpec, WeightNames
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import excerpt

LLAMA_NAMES = WeightNames(
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
)
QK_NORM_NAMES = replace(LLAMA_NAMES, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
POST_NORM_NAMES = replace(
    QK_NORM_NAMES,
    attention_norm=None,
    mlp_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
INTERNLM2_NAMES = WeightNames(
    embedding="model.tok_embeddings",
    final_norm="model.norm",
    head="output",
    layer="model.layers.{layer}.",
    attention_norm="attention_norm",
    query="attention.wqkv",
    key="attention.wqkv",
    value="attention.wqkv",
    attention_out="attention.wo",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)
WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


def _granite(spec: DecoderSpec, values: Values) -> DecoderSpec:
    scale = values.number("attention_multiplier", 1.0)
    return replace(
        spec,
        layers=tuple(replace(layer, attention_scale=scale) for layer in spec.layers),
        embedding_scale=values.number("embedding_multiplier", 1.0),
        residual_scale=values.number("residual_multiplier", 1.0),
        logit_scale=1 / values.number("logits_scaling", 1.0),
    )


def _smollm3(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Removes positions from every fourth layer, or from the layers listed with 0.

    Without layer_types only those layers may have a window.
    """
    interval = values.count("no_rope_layer_interval", 4)
    listed = values.per_layer("no_rope_layers", spec.num_layers)
    rotated = listed or [(index + 1) % interval != 0 for index in range(spec.num_layers)]
    listed_windows = values.optional("layer_types") is not None
    return replace(
        spec,
        layers=tuple(
            replace(layer, rotary=0 if has else None, window=layer.window if listed_windows or not has else None)
            for layer, has in zip(spec.layers, rotated, strict=False)
        ),
    )


def _clipped(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return replace(spec, qkv_clip=values.optional_number("clip_qkv"))


def _cohere(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return replace(spec, logit_scale=values.number("logit_scale", 0.0625))


def _phi3_longrope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Renames the old names of LongRoPE for Phi 3, "su" and "yarn"."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    table = config.get(key)
    if not isinstance(table, dict) or table.get("rope_type", table.get("type")) not in ("su", "yarn"):
        return config
    return {**config, key: {**table, "rope_type": "longrope"}}


def _phi3(spec: DecoderSpec, values: Values) -> DecoderSpec:
    kind = rotary_kind(values)
    if kind not in ("default", "longrope"):
        raise rotary_table(values).error("rope_type", f"{excerpt(kind)} is not supported, only default, longrope")
    return spec


def _stablelm(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return replace(spec, names=replace(spec.names, mlp_norm=None)) if spec.parallel else spec


LLAMA = Architecture(
    model_type="llama",
    title="Llama 1 to 3, and what is stored as such",
    names=LLAMA_NAMES,
    choices=Choices(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
)
MISTRAL = Architecture(
    model_type="mistral",
    title="Mistral",
    names=LLAMA_NAMES,
    choices=Choices(windowed=windows.every_layer),
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
QWEN2 = Architecture(
    model_type="qwen2",
    title="Qwen 2 and 2.5",
    names=LLAMA_NAMES,
    choices=Choices(qkv_bias=True, windowed=windows.upper_layers),
    defaults=WINDOW_DEFAULTS,
)
QWEN3 = Architecture(
    model_type="qwen3",
    title="Qwen 3",
    names=QK_NORM_NAMES,
    choices=Choices(qk_norm="shared", qkv_bias="attention_bias", out_bias="attention_bias", windowed=windows.upper_layers),
    defaults={**WINDOW_DEFAULTS, "head_dim": 128},
)
GRANITE = Architecture(
    model_type="granite",
    title="Granite 3",
    names=LLAMA_NAMES,
    choices=LLAMA.choices,
    refine=_granite,
    refined="factors for embeddings, scores, residuals and logits",
)
SMOLLM3 = Architecture(
    model_type="smollm3",
    title="SmolLM 3",
    names=LLAMA_NAMES,
    choices=replace(LLAMA.choices, windowed=windows.every_layer_if_used),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2000000.0},
    refine=_smollm3,
    refined="layers without positions",
)
OLMO = Architecture(
    model_type="olmo",
    title="OLMo 1",
    names=LLAMA_NAMES,
    choices=Choices(norm="layer", norm_weight=False, qkv_bias="attention_bias", out_bias="attention_bias"),
    fixed={"rms_norm_eps": 1e-5},
    refine=_clipped,
    refined="queries, keys and values clipped",
)
OLMO2 = Architecture(
    model_type="olmo2",
    title="OLMo 2",
    names=POST_NORM_NAMES,
    choices=Choices(qk_norm="width", qkv_bias="attention_bias", out_bias="attention_bias"),
    defaults={"rms_norm_eps": 1e-5},
)
STABLELM = Architecture(
    model_type="stablelm",
    title="StableLM 2 and 3B",
    names=replace(LLAMA_NAMES, query_norm="self_attn.q_layernorm.norms.{head}", key_norm="self_attn.k_layernorm.norms.{head}"),
    choices=Choices(
        norm="layer",
        norm_bias=True,
        qk_norm="head_list",
        qk_normed="qk_layernorm",
        qkv_bias="use_qkv_bias",
        parallel="use_parallel_residual",
        rotated="factor",
    ),
    renamed={"rms_norm_eps": "layer_norm_eps"},
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    refine=_stablelm,
)
COHERE = Architecture(
    model_type="cohere",
    title="Command R",
    names=replace(QK_NORM_NAMES, mlp_norm=None),
    choices=Choices(
        norm="layer",
        qk_norm="heads",
        qk_normed="use_qk_norm",
        interleaved=True,
        parallel=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    renamed={"rms_norm_eps": "layer_norm_eps"},
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0},
    refine=_cohere,
    refined="logits scaled",
)
STARCODER2 = Architecture(
    model_type="starcoder2",
    title="StarCoder 2",
    names=replace(LLAMA_NAMES, gate=None, up="mlp.c_fc", down="mlp.c_proj"),
    choices=Choices(
        norm="layer",
        norm_bias=True,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        windowed=windows.every_layer,
        layer_types=False,
    ),
    renamed={"rms_norm_eps": "norm_epsilon"},
    defaults={
        "rms_norm_eps": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 2,
        "sliding_window": None,
    },
)
PHI3 = Architecture(
    model_type="phi3",
    title="Phi 3 and 4",
    names=replace(
        LLAMA_NAMES,
        query="self_attn.qkv_proj",
        key="self_attn.qkv_proj",
        value="self_attn.qkv_proj",
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
    ),
    choices=Choices(qkv_layout="stacked", rotated="factor", windowed=windows.every_layer, layer_types=False),
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    older=_phi3_longrope,
    refine=_phi3,
)
INTERNLM2 = Architecture(
    model_type="internlm2",
    title="InternLM 2 and 2.5",
    names=INTERNLM2_NAMES,
    choices=Choices(qkv_layout="grouped", qkv_bias="bias", out_bias="bias"),
    defaults={"bias": True},
)
