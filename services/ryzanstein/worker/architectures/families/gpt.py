"""The GPT family: layer norms with biases, ungated MLPs, learned or partly rotated positions."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.spec import DecoderSpec, WeightNames
from ryzanstein.worker.architectures.values import Values

_GPT = Choices(norm="layer", norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True)
_GPT_RENAMED = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
_MULTI_HEAD = {"head_dim": None, "num_key_value_heads": None}
"""Keys that these architectures lack: each head has its own keys and a share of the width."""
_LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}


def _gpt2(spec: DecoderSpec, values: Values) -> DecoderSpec:
    scale = spec.layers[0].attention_scale if values.flag("scale_attn_weights") else 1.0
    deeper = values.flag("scale_attn_by_inverse_layer_idx")
    layers = (
        replace(layer, attention_scale=scale / (index + 1) if deeper else scale) for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _opt(spec: DecoderSpec, values: Values) -> DecoderSpec:
    width = values.count("word_embed_proj_dim", spec.hidden_size)
    if width != spec.hidden_size:
        raise values.error("word_embed_proj_dim", f"{width} is not supported, only hidden_size {spec.hidden_size}")
    return spec


GPT2 = Architecture(
    model_type="gpt2",
    title="GPT-2",
    names=WeightNames(
        embedding="transformer.wte",
        position="transformer.wpe",
        final_norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{layer}.",
        attention_norm="ln_1",
        query="attn.c_attn",
        key="attn.c_attn",
        value="attn.c_attn",
        attention_out="attn.c_proj",
        mlp_norm="ln_2",
        gate=None,
        up="mlp.c_fc",
        down="mlp.c_proj",
        prefix="transformer.",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    choices=replace(_GPT, positions="learned", qkv_layout="stacked", transposed=True),
    renamed=_GPT_RENAMED,
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "scale_attn_weights": True,
    },
    fixed=_MULTI_HEAD,
    required={"add_cross_attention": False},
    refine=_gpt2,
    refined="scores scaled by layer where `scale_attn_by_inverse_layer_idx`",
)
GPT_NEOX = Architecture(
    model_type="gpt_neox",
    title="GPT-NeoX, Pythia",
    names=WeightNames(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.{layer}.",
        attention_norm="input_layernorm",
        query="attention.query_key_value",
        key="attention.query_key_value",
        value="attention.query_key_value",
        attention_out="attention.dense",
        mlp_norm="post_attention_layernorm",
        gate=None,
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    choices=replace(
        _GPT,
        qkv_layout="grouped",
        parallel="use_parallel_residual",
        rotated="factor",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    renamed={**_LAYER_NORM_EPS, "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    fixed={"num_key_value_heads": None},
)
GPTJ = Architecture(
    model_type="gptj",
    title="GPT-J",
    names=WeightNames(
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{layer}.",
        attention_norm="ln_1",
        query="attn.q_proj",
        key="attn.k_proj",
        value="attn.v_proj",
        attention_out="attn.out_proj",
        mlp_norm=None,
        gate=None,
        up="mlp.fc_in",
        down="mlp.fc_out",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    choices=replace(_GPT, rotated="count", interleaved=True, parallel=True, qkv_bias=False, out_bias=False, head_bias=True),
    renamed=_GPT_RENAMED,
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "rotary_dim": 64},
    fixed=_MULTI_HEAD,
)
PHI = Architecture(
    model_type="phi",
    title="Phi 1, 1.5 and 2",
    names=WeightNames(
        embedding="model.embed_tokens",
        final_norm="model.final_layernorm",
        head="lm_head",
        layer="model.layers.{layer}.",
        attention_norm="input_layernorm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.dense",
        mlp_norm=None,
        gate=None,
        up="mlp.fc1",
        down="mlp.fc2",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        ignored=("rotary_emb.inv_freq",),
    ),
    choices=replace(
        _GPT, rotated="factor", qk_norm="shared", qk_norm_bias=True, qk_normed="qk_layernorm", parallel=True, head_bias=True
    ),
    renamed=_LAYER_NORM_EPS,
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
)
OPT = Architecture(
    model_type="opt",
    title="OPT, those with norms before the layers",
    names=WeightNames(
        embedding="model.decoder.embed_tokens",
        position="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        head="lm_head",
        layer="model.decoder.layers.{layer}.",
        attention_norm="self_attn_layer_norm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        gate=None,
        up="fc1",
        down="fc2",
        prefix="model.",
    ),
    choices=replace(
        _GPT,
        positions="learned",
        position_offset=2,
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        mlp_bias="enable_bias",
    ),
    renamed={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    defaults={"tie_word_embeddings": True, "hidden_act": "relu", "enable_bias": True},
    fixed={**_MULTI_HEAD, "rms_norm_eps": 1e-5},
    required={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    refine=_opt,
)
