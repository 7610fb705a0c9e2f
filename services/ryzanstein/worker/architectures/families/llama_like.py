"""Llama and the architectures that share its layout of weights.

They have a norm before each half of a layer, rotary positions, grouped queries and a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.rotary.config import rotary_kind, rotary_table
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
_MAX_BASE = 1e15  # of a rotation; known models have 1e11
WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}


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


def with_rotation(config: Mapping[str, Any], usual: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config with the architecture's usual rotation, where it has no settings of one. Its base may stand alone."""
    if any(config.get(key) is not None for key in ("rope_parameters", "rope_scaling")):
        return config
    return {**config, "rope_parameters": {**usual, "rope_theta": config.get("rope_theta", usual["rope_theta"])}}


def with_own_head_dim(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config without a null size of heads: the width over their number, whatever an absent one means."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("head_dim", ...) is not None or not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return config
    return {**config, "head_dim": max(1, width // heads)}


def _exaone4(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Removes positions from layers without a window, if the model has windows at all."""
    if values.optional_count("sliding_window") is None:
        return spec
    layers = (replace(layer, rotary=None if layer.window is None else 0) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _hunyuan(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Stretches the base of the rotation by `alpha`, once and for all (NTK-aware scaling), where it is "dynamic" by name."""
    table = rotary_table(values)
    if rotary_kind(values) != "dynamic" or not table.optional("alpha"):
        return spec
    (rotary,) = spec.rotaries
    if spec.head_dim <= 2 or rotary.theta * table.number("alpha") > _MAX_BASE:
        raise table.error("alpha", f"{excerpt(table.optional('alpha'))} is not supported for heads of {spec.head_dim} numbers")
    theta = rotary.theta * table.number("alpha") ** (spec.head_dim / (spec.head_dim - 2))
    return replace(spec, rotaries=(replace(rotary, theta=theta),))


LLAMA = Architecture(
    model_type="llama",
    title="Llama 1 to 3, and what is stored as such",
    names=LLAMA_NAMES,
    choices=Choices(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
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
SMOLLM3 = Architecture(
    model_type="smollm3",
    title="SmolLM 3",
    names=LLAMA_NAMES,
    choices=replace(LLAMA.choices, windowed=windows.every_layer_if_used),
    defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2000000.0},
    refine=_smollm3,
    refined="layers without positions",
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
SEED_OSS = Architecture(
    model_type="seed_oss",
    title="Seed-OSS",
    names=LLAMA_NAMES,
    choices=Choices(qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
    older=with_own_head_dim,
)
HELIUM = Architecture(
    model_type="helium",
    title="Helium 1",
    names=LLAMA_NAMES,
    choices=Choices(interleaved=True, qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    defaults={"rms_norm_eps": 1e-8, "head_dim": 128, "num_key_value_heads": 20, "rope_theta": 1e5},
)
EXAONE4 = Architecture(
    model_type="exaone4",
    title="EXAONE 4",
    names=POST_NORM_NAMES,
    choices=Choices(qk_norm="shared", windowed=windows.all_but_one_in_a_pattern),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 32},
    refine=_exaone4,
    refined="positions only in layers with a window, if there are any",
)
HUNYUAN_DENSE = Architecture(
    model_type="hunyuan_v1_dense",
    title="Hunyuan, dense",
    names=replace(LLAMA_NAMES, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
    choices=Choices(qk_norm="shared", qk_norm_last=True, qkv_bias="attention_bias", out_bias="attention_bias"),
    defaults={"rms_norm_eps": 1e-5},
    refine=_hunyuan,
    refined="the base of the rotation stretched by `alpha`",
)
CWM = Architecture(
    model_type="cwm",
    title="Code World Model",
    names=LLAMA_NAMES,
    choices=Choices(windowed=windows.all_but_the_first_of_four),
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "sliding_window": 8192,
        "rope_theta": 1e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
)
