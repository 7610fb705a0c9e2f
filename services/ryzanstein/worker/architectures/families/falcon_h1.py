"""Falcon H1 of TII: attention and Mamba 2 beside each other in every layer, and factors almost everywhere. And Bamba of IBM,
whose layers have one of the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES
from ryzanstein.worker.architectures.families.mamba import MAMBA_DEFAULTS, mamba_names, mamba_spec
from ryzanstein.worker.architectures.mixers import MambaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec, Factors
from ryzanstein.worker.architectures.values import Values

_NUM_PARTS = 5  # gates, inputs, rows of writing and of reading, steps


def _falcon_h1(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds a state space to every layer. A factor of keys is one of scores."""
    mamba, keys = _mamba(spec, values), values.number("key_multiplier", 1.0)
    gate, mlp_out = _factors(values, "mlp_multipliers", 2)
    return replace(
        spec,
        layers=tuple(replace(layer, state=mamba, attention_scale=keys * layer.attention_scale) for layer in spec.layers),
        embedding_scale=values.number("embedding_multiplier", 1.0),
        logit_scale=values.number("lm_head_multiplier", 1.0),
        factors=Factors(
            attention_in=values.number("attention_in_multiplier", 1.0),
            attention_out=values.number("attention_out_multiplier", 1.0),
            gate=gate,
            mlp_out=mlp_out,
        ),
    )


def _mamba(spec: DecoderSpec, values: Values) -> MambaSpec:
    width = values.optional("mamba_d_ssm")
    width = values.count("mamba_expand") * spec.hidden_size if width is None else values.count("mamba_d_ssm")
    order: Literal["before_gate", "gated"] = "before_gate" if values.flag("mamba_norm_before_gate") else "gated"
    gates, inputs, writing, reading, steps = _factors(values, "ssm_multipliers", _NUM_PARTS)
    return replace(
        mamba_spec(spec, values, width),
        out_bias=values.flag("projectors_bias"),
        norm=order if values.flag("mamba_rms_norm") else None,
        in_scale=values.number("ssm_in_multiplier", 1.0),
        part_scales=(gates, inputs, writing, reading, steps),
        out_scale=values.number("ssm_out_multiplier", 1.0),
    )


def _bamba(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Puts Mamba 2 in the place of attention, but in the layers that config.json names."""
    attention = values.indices("attn_layer_indices")
    if not any(index in attention for index in range(spec.num_layers)):
        raise values.error("attn_layer_indices", "names no layer: a model without keys and values is not supported")
    mamba = mamba_spec(spec, values, values.count("mamba_expand") * spec.hidden_size)
    layers = (
        layer if index in attention else replace(layer, rotary=None, state=mamba, attention=False)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _factors(values: Values, key: str, count: int) -> tuple[float, ...]:
    """Returns a list of factors; all are 1 if there is none. Raises CheckpointError for another number of them."""
    found = (1.0,) * count if values.optional(key) is None else values.numbers(key)
    if len(found) != count:
        raise values.error(key, f"must be {count} numbers, got {len(found)}")
    return found


_NAMES = replace(
    LLAMA_NAMES,
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    mamba=mamba_names("mamba."),
)
_CHOICES = Choices(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
BAMBA = Architecture(
    model_type="bamba",
    title="Bamba",
    names=_NAMES,
    choices=replace(_CHOICES, rotated="factor"),
    defaults={
        **MAMBA_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 262_144,
    },
    fixed={"partial_rotary_factor": 0.5},
    refine=_bamba,
    refined="attention in the layers of `attn_layer_indices`",
)
FALCON_H1 = Architecture(
    model_type="falcon_h1",
    title="Falcon H1",
    names=_NAMES,
    choices=_CHOICES,
    defaults={
        **MAMBA_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
    },
    required={"mamba_use_mlp": True, "attn_layer_indices": None},
    refine=_falcon_h1,
    refined="Mamba 2 beside attention; factors for embeddings, logits, keys, and what goes into and comes out of each part",
)
