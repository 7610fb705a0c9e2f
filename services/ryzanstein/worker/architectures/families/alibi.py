"""Bloom, Falcon and MPT: linear biases instead of rotary positions, fused query, key and value.

Falcon has either linear biases or rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.spec import AlibiSpec, DecoderSpec, WeightNames
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import CheckpointError, excerpt

_BLOOM_NAMES = WeightNames(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    head="lm_head",
    layer="transformer.h.{layer}.",
    attention_norm="input_layernorm",
    query="self_attention.query_key_value",
    key="self_attention.query_key_value",
    value="self_attention.query_key_value",
    attention_out="self_attention.dense",
    mlp_norm="post_attention_layernorm",
    gate=None,
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    prefix="transformer.",
    ignored=("self_attention.maybe_rotary.inv_freq", "self_attention.rotary_emb.inv_freq"),
)
_MPT_ATTENTION = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "alibi": True, "alibi_bias_max": 8}
"""transformers uses ALiBi with 8 in any case: there is no reference for another number."""


def _falcon_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drops `num_kv_heads` before the third generation, where it has no effect."""
    return config if config.get("new_decoder_architecture") else {**config, "num_kv_heads": None}


def _falcon(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Applies the three generations: many heads (RW), one key-value head (7B), groups (40B on)."""
    groups = values.flag("new_decoder_architecture")
    single = not groups and values.flag("multi_query")
    parallel = groups or values.flag("parallel_attn")
    return replace(
        spec,
        names=_falcon_names(values, groups, parallel),
        num_kv_heads=1 if single else spec.num_kv_heads if groups else spec.num_heads,
        qkv_layout="stacked" if single else "grouped",
        parallel=parallel,
        **_falcon_positions(spec, values),
    )


def _falcon_names(values: Values, groups: bool, parallel: bool) -> WeightNames:
    names = replace(_BLOOM_NAMES, embedding_norm=None)
    if not parallel:
        return names
    num_norms = values.optional("num_ln_in_parallel_attn")
    if groups and num_norms in (None, 2):
        return replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    if num_norms not in (None, 1):
        raise CheckpointError(f"config.json: num_ln_in_parallel_attn {excerpt(num_norms)} is not supported")
    return replace(names, mlp_norm=None)


def _falcon_positions(spec: DecoderSpec, values: Values) -> dict[str, Any]:
    if not values.flag("alibi"):
        return {}
    layers = tuple(replace(layer, rotary=None) for layer in spec.layers)
    return {"alibi": AlibiSpec(scale=spec.head_dim**-0.5, rounded=True), "rotaries": (), "layers": layers}


def _mpt(spec: DecoderSpec, values: Values) -> DecoderSpec:
    attention = values.table("attn_config")
    for key, only in _MPT_ATTENTION.items():
        if attention.config.get(key, only) != only:
            raise CheckpointError(
                f"config.json: attn_config.{key} {excerpt(attention.config[key])} is not supported, only {only!r}"
            )
    scale = attention.number("softmax_scale", spec.head_dim**-0.5)
    return replace(
        spec,
        qkv_clip=attention.optional_number("clip_qkv"),
        layers=tuple(replace(layer, attention_scale=scale) for layer in spec.layers),
    )


BLOOM = Architecture(
    model_type="bloom",
    title="BLOOM",
    names=_BLOOM_NAMES,
    choices=Choices(
        norm="layer",
        norm_bias=True,
        positions="alibi",
        qkv_layout="grouped",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    renamed={
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
    },
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    },
    fixed={"hidden_act": "gelu_new", "head_dim": None, "num_key_value_heads": None, "intermediate_size": None},
    required={"apply_residual_connection_post_layernorm": False},
)
FALCON = Architecture(
    model_type="falcon",
    title="Falcon, all generations",
    names=replace(_BLOOM_NAMES, embedding_norm=None),
    choices=Choices(
        norm="layer",
        norm_bias=True,
        qkv_layout="grouped",
        parallel="parallel_attn",
        qkv_bias="bias",
        out_bias="bias",
        mlp_bias="bias",
    ),
    renamed={
        "rms_norm_eps": "layer_norm_epsilon",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
    },
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "multi_query": True,
        "parallel_attn": True,
    },
    older=_falcon_heads,
    refine=_falcon,
    refined="ALiBi where `alibi`, one key-value head where `multi_query`, groups where `new_decoder_architecture`",
)
MPT = Architecture(
    model_type="mpt",
    title="MPT",
    names=WeightNames(
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        head="lm_head",
        layer="transformer.blocks.{layer}.",
        attention_norm="norm_1",
        query="attn.Wqkv",
        key="attn.Wqkv",
        value="attn.Wqkv",
        attention_out="attn.out_proj",
        mlp_norm="norm_2",
        gate=None,
        up="ffn.up_proj",
        down="ffn.down_proj",
    ),
    choices=Choices(norm="layer", positions="alibi", qkv_layout="stacked"),
    renamed={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    fixed={"hidden_act": "gelu", "head_dim": None, "num_key_value_heads": None, "intermediate_size": None},
    required={"no_bias": True, "logit_scale": None, "expansion_ratio": 4, "norm_type": "low_precision_layernorm"},
    refine=_mpt,
    refined="queries, keys and values clipped",
)
