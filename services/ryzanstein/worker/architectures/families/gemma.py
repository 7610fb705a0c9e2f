"""Gemma 1 to 3, and VaultGemma.

Norms store their scale minus one, and embeddings are scaled by the root of the width. From Gemma 2
on there are norms around each half of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures import windows
from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.gemma4 import GEMMA4_DEFAULTS, GEMMA4_NAMES, gemma4, whole_last_layer
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES
from ryzanstein.worker.architectures.rotary.kinds import with_rotary_kinds
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.values import Values

_NAMES = replace(
    LLAMA_NAMES,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_CHOICES = Choices(norm_plus_one=True, qkv_bias="attention_bias", out_bias="attention_bias")
_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
}
_REQUIRED = {"use_bidirectional_attention": False}


def _gemma1_gelu(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces "gelu" of the first checkpoints: training used its tanh approximation."""
    return {**config, "hidden_act": "gelu_pytorch_tanh"} if config.get("hidden_act") == "gelu" else config


def _gemma(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return replace(spec, embedding_scale=math.sqrt(spec.hidden_size))


def _gemma2(spec: DecoderSpec, values: Values) -> DecoderSpec:
    scale = values.number("query_pre_attn_scalar") ** -0.5
    return replace(
        _gemma(spec, values),
        layers=tuple(replace(layer, attention_scale=scale) for layer in spec.layers),
        score_cap=values.optional_number("attn_logit_softcapping"),
        logit_cap=values.optional_number("final_logit_softcapping"),
    )


def _gemma3(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds the two rotations of Gemma 3.

    Layers with a window use another base, and no scaling except their own.
    """
    thetas = {"whole_theta": values.number("rope_theta", 1e6), "local_theta": values.number("rope_local_base_freq", 1e4)}
    return with_rotary_kinds(_gemma2(spec, values), values, **thetas)


GEMMA = Architecture(
    model_type="gemma",
    title="Gemma 1",
    names=LLAMA_NAMES,
    choices=_CHOICES,
    defaults={**_DEFAULTS, "num_key_value_heads": None},
    required=_REQUIRED,
    older=_gemma1_gelu,
    refine=_gemma,
    refined="embeddings scaled",
)
GEMMA2 = Architecture(
    model_type="gemma2",
    title="Gemma 2",
    names=_NAMES,
    choices=replace(_CHOICES, windowed=windows.even_layers),
    renamed={"hidden_act": "hidden_activation"},
    defaults={**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    required=_REQUIRED,
    refine=_gemma2,
    refined="embeddings scaled, scores and logits capped",
)
GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    title="Gemma 3, text only",
    names=replace(_NAMES, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    choices=replace(_CHOICES, rotated="kinds", qk_norm="shared", windowed=windows.all_but_each_sixth),
    renamed={"hidden_act": "hidden_activation"},
    defaults=_DEFAULTS,
    fixed={"attn_logit_softcapping": None},
    required=_REQUIRED,
    refine=_gemma3,
    refined="embeddings scaled, layers with windows rotate by another base",
)
GEMMA4_TEXT = Architecture(
    model_type="gemma4_text",
    title="Gemma 4",
    names=GEMMA4_NAMES,
    choices=replace(_CHOICES, norm_plus_one=False, rotated="kinds", qk_norm="shared", windowed=windows.all_but_each_sixth),
    renamed={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    defaults=GEMMA4_DEFAULTS,
    required={"use_bidirectional_attention": "vision"},
    older=whole_last_layer,
    refine=gemma4,
    unequal=True,
    refined="embeddings scaled, layers without windows have other heads, keys shared by layers, per-layer embeddings",
)
VAULTGEMMA = Architecture(
    model_type="vaultgemma",
    title="VaultGemma",
    names=replace(LLAMA_NAMES, mlp_norm="pre_feedforward_layernorm"),
    choices=GEMMA2.choices,
    renamed=GEMMA2.renamed,
    defaults=GEMMA2.defaults,
    refine=_gemma2,
    refined=GEMMA2.refined,
)
