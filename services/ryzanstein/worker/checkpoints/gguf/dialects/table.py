"""The architectures that are converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ryzanstein.worker.checkpoints.gguf.dialects.deltas import DeltaRule
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.experts import ErnieExperts, Experts, LfmExperts, NemotronExperts
from ryzanstein.worker.checkpoints.gguf.dialects.heads import (
    ConvolvedHeads,
    GemmaWindows,
    GrowingHeads,
    PartlyRotatedHeads,
    PlainHeads,
    UntruncatedHeads,
    WholeHeads,
)
from ryzanstein.worker.checkpoints.gguf.dialects.latents import SIGMOID, SOFTMAX, DeepseekExperts, LatentHeads
from ryzanstein.worker.checkpoints.gguf.dialects.layers import LayerHeads
from ryzanstein.worker.checkpoints.gguf.dialects.shapes import (
    AlternatingWindows,
    FalconGeneration,
    GraniteExperts,
    MixedHeads,
    MptAttention,
    ParallelHalves,
    PatternWindows,
    StateSpaces,
)
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError, excerpt

_QUERY_BIAS = "blk.0.attn_q.bias"
_ATTENTION_BIAS = {"attention_bias": _QUERY_BIAS}
_SILU = {"hidden_act": "silu"}
_GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_UNTIED = {"tie_word_embeddings": False}  # llama.cpp needs a head
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_SQUARED = {"hidden_act": "relu2"}
_SQUARE, _PARTLY = WholeHeads(square=True), PartlyRotatedHeads(square=False)

LLAMA = Dialect(
    "llama",
    "llama",
    "LlamaForCausalLM",
    permuted=True,
    fixed=_SILU,
    present={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
)
MISTRAL = Dialect("llama", "mistral", "MistralForCausalLM", permuted=True, fixed={**_SILU, "sliding_window": None})
MIXTRAL = Dialect(
    "llama",
    "mixtral",
    "MixtralForCausalLM",
    permuted=True,
    fixed={**_SILU, "sliding_window": None},
    features=(Experts(),),
)
INTERNLM2 = Dialect(
    "internlm2",
    "internlm2",
    "InternLM2ForCausalLM",
    permuted=True,
    split_qkv=True,
    fixed={**_SILU, **_UNTIED, "bias": False},
    heads=_SQUARE,
)
_READ_INTERNLM2 = replace(LLAMA, name="internlm2", fixed={**_SILU, **_UNTIED, **_NO_BIAS}, present={})
QWEN2 = Dialect("qwen2", "qwen2", "Qwen2ForCausalLM", fixed={**_SILU, "use_sliding_window": False}, heads=_SQUARE)
QWEN3 = Dialect("qwen3", "qwen3", "Qwen3ForCausalLM", fixed={**_SILU, "use_sliding_window": False}, present=_ATTENTION_BIAS)
QWEN2_MOE = Dialect(
    "qwen2moe",
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    fixed={**_SILU, **_UNTIED, **_SPARSE, "norm_topk_prob": False},
    present={"qkv_bias": _QUERY_BIAS},
    heads=_SQUARE,
    features=(Experts("moe_intermediate_size", shared=True),),
)
QWEN3_MOE = Dialect(
    "qwen3moe",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    fixed={**_SILU, **_SPARSE, "norm_topk_prob": True},
    present=_ATTENTION_BIAS,
    features=(Experts("moe_intermediate_size"),),
)
DEEPSEEK_V2 = Dialect(
    "deepseek2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    fixed={**_SILU, **_NO_BIAS},
    heads=LatentHeads(),
    features=(Experts("moe_intermediate_size"), DeepseekExperts(SOFTMAX)),
)
DEEPSEEK_V3 = Dialect(
    "deepseek2",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    fixed={**_SILU, **_NO_BIAS},
    heads=LatentHeads(),
    features=(Experts("moe_intermediate_size"), DeepseekExperts(SIGMOID)),
)
GEMMA = Dialect("gemma", "gemma", "GemmaForCausalLM", plus_one=True, fixed=_GEMMA)
GEMMA2 = Dialect(
    "gemma2",
    "gemma2",
    "Gemma2ForCausalLM",
    plus_one=True,
    scalars={"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
    assumed={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fixed=_GEMMA,
    features=(GemmaWindows(period=2, usual=4096, largest=46),),
)
GEMMA3 = Dialect(
    "gemma3",
    "gemma3_text",
    "Gemma3ForCausalLM",
    plus_one=True,
    scalars={"final_logit_softcapping": "final_logit_softcapping"},
    assumed={"final_logit_softcapping": None},
    fixed=_GEMMA,
    features=(GemmaWindows(period=6, usual=0, largest=62, bases=True),),
)
GEMMA4 = Dialect(
    "gemma4",
    "gemma4_text",
    "Gemma4ForCausalLM",
    own_widths=True,
    scalars={"final_logit_softcapping": "final_logit_softcapping"},
    assumed={"final_logit_softcapping": None},
    fixed={"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    heads=LayerHeads(),
)
GRANITE = Dialect(
    "granite",
    "granite",
    "GraniteForCausalLM",
    permuted=True,
    scalars={
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    fixed={**_SILU, "mlp_bias": False},
    present=_ATTENTION_BIAS,
)
SMOLLM3 = Dialect(
    "smollm3",
    "smollm3",
    "SmolLM3ForCausalLM",
    permuted=True,
    fixed={**_SILU, "no_rope_layer_interval": 4, "use_sliding_window": False, "mlp_bias": False},
    present=_ATTENTION_BIAS,
)
OLMO = Dialect(
    "olmo",
    "olmo",
    "OlmoForCausalLM",
    permuted=True,
    layer_norm=True,
    scalars={"clip_qkv": "attention.clamp_kqv"},
    assumed={"clip_qkv": None},
    fixed={**_SILU, "attention_bias": False},
    heads=_SQUARE,
)
OLMO2 = Dialect("olmo2", "olmo2", "Olmo2ForCausalLM", fixed=_SILU, present=_ATTENTION_BIAS)
PHI = Dialect(
    "phi2",
    "phi",
    "PhiForCausalLM",
    layer_norm=True,
    fixed={**_UNTIED, "hidden_act": "gelu_new", "qk_layernorm": False},
    heads=PartlyRotatedHeads(),
)
PHI3 = Dialect("phi3", "phi3", "Phi3ForCausalLM", fixed={**_SILU, "sliding_window": None})
COHERE = Dialect(
    "command-r",
    "cohere",
    "CohereForCausalLM",
    layer_norm=True,
    scalars={"logit_scale": "logit_scale"},
    fixed={**_SILU, "attention_bias": False},
    present={"use_qk_norm": "blk.0.attn_q_norm.weight"},
)
STABLELM = Dialect(
    "stablelm",
    "stablelm",
    "StableLmForCausalLM",
    layer_norm=True,
    fixed={**_SILU, **_UNTIED},
    present={"use_qkv_bias": _QUERY_BIAS, "qk_layernorm": "blk.0.attn_q_norm.weight"},
    absent={"use_parallel_residual": "blk.0.ffn_norm.weight"},
    heads=PartlyRotatedHeads(),
)
STARCODER2 = Dialect(
    "starcoder2",
    "starcoder2",
    "Starcoder2ForCausalLM",
    layer_norm=True,
    fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    present={"use_bias": _QUERY_BIAS},
    heads=_SQUARE,
)
GPT2 = Dialect(
    "gpt2",
    "gpt2",
    "GPT2LMHeadModel",
    layer_norm=True,
    fixed={"hidden_act": "gelu_new"},
    heads=PlainHeads(),
)
GPT_NEOX = Dialect(
    "gptneox",
    "gpt_neox",
    "GPTNeoXForCausalLM",
    layer_norm=True,
    fixed={**_UNTIED, "hidden_act": "gelu", "attention_bias": True},
    heads=PartlyRotatedHeads(),
    features=(ParallelHalves(),),
)
FALCON = Dialect(
    "falcon",
    "falcon",
    "FalconForCausalLM",
    layer_norm=True,
    fixed={"hidden_act": "gelu", "bias": False, "alibi": False, "parallel_attn": True},
    heads=_SQUARE,
    features=(FalconGeneration(),),
)
BLOOM = Dialect("bloom", "bloom", "BloomForCausalLM", layer_norm=True, heads=PlainHeads())
MPT = Dialect("mpt", "mpt", "MptForCausalLM", layer_norm=True, heads=PlainHeads(), features=(MptAttention(),))

ARCEE = Dialect(
    "arcee",
    "arcee",
    "ArceeForCausalLM",
    permuted=True,
    fixed=_SQUARED,
    present={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
)
NEMOTRON = Dialect(
    "nemotron",
    "nemotron",
    "NemotronForCausalLM",
    layer_norm=True,
    plus_one=True,
    fixed=_SQUARED,
    present={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
    heads=PartlyRotatedHeads(),
)
JAIS2 = Dialect(
    "jais2",
    "jais2",
    "Jais2ForCausalLM",
    layer_norm=True,
    fixed=_SQUARED,
    present={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
)
OLMOE = Dialect(
    "olmoe",
    "olmoe",
    "OlmoeForCausalLM",
    fixed={**_SILU, "norm_topk_prob": False, "attention_bias": False, "clip_qkv": None},
    heads=_SQUARE,
    features=(Experts(),),
)
HUNYUAN_DENSE = Dialect(
    "hunyuan-dense",
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    fixed={**_SILU, "attention_bias": False},
)
SEED_OSS = Dialect(
    "seed_oss",
    "seed_oss",
    "SeedOssForCausalLM",
    fixed={**_SILU, "mlp_bias": False, "attention_out_bias": False},
    present=_ATTENTION_BIAS,
    mlp_norm="post_attention_norm",
)
ERNIE = Dialect("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", fixed=_SILU, present={"use_bias": _QUERY_BIAS})
GLM = Dialect("chatglm", "glm", "GlmForCausalLM", fixed=_SILU, present=_ATTENTION_BIAS, heads=_PARTLY)
GLM4 = Dialect("glm4", "glm4", "Glm4ForCausalLM", fixed=_SILU, present=_ATTENTION_BIAS, heads=_PARTLY)
COHERE2 = Dialect(
    "cohere2",
    "cohere2",
    "Cohere2ForCausalLM",
    layer_norm=True,
    scalars={"logit_scale": "logit_scale"},
    fixed={**_SILU, "attention_bias": False},
    heads=_SQUARE,
    features=(PatternWindows(),),
)
EXAONE4 = Dialect("exaone4", "exaone4", "Exaone4ForCausalLM", fixed=_SILU, features=(PatternWindows(layers=64),))
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
ERNIE_MOE = replace(
    ERNIE,
    name="ernie4_5-moe",
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    heads=_SQUARE,
    features=(Experts("moe_intermediate_size"), ErnieExperts()),
)
MINISTRAL3 = Dialect(
    "mistral3",
    "ministral3",
    "Ministral3ForCausalLM",
    permuted=True,
    fixed={**_SILU, "sliding_window": None},
    heads=GrowingHeads(),
)
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    fixed=_SILU,
    features=(Experts(),),
)
GRANITE_HYBRID = replace(
    GRANITE,
    name="granitehybrid",
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    fixed={**_SILU, "mamba_proj_bias": False},
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
        **_SILU,
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
GLM4_MOE = Dialect(
    "glm4moe",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    fixed=_SILU,
    present={**_ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
    mlp_norm="post_attention_norm",
    heads=_PARTLY,
    features=(Experts("moe_intermediate_size"), DeepseekExperts(SIGMOID)),
)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, model_type="glm4_moe_lite", class_name="Glm4MoeLiteForCausalLM")
OLMO3 = replace(OLMO2, model_type="olmo3", class_name="Olmo3ForCausalLM", features=(PatternWindows(),))

QWEN35 = Dialect(
    "qwen35",
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    tiled=True,
    plus_one=True,
    fixed={**_SILU, "attention_bias": False},
    mlp_norm="post_attention_norm",
    each_layer="attn_norm.weight",
    heads=_PARTLY,
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
    fixed={**QWEN35.fixed, **_SPARSE, "norm_topk_prob": True},
    features=(DeltaRule(sections=False), Experts("moe_intermediate_size", shared=True)),
)
GPT_OSS = Dialect(
    "gpt-oss",
    "gpt_oss",
    "GptOssForCausalLM",
    fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    present=_ATTENTION_BIAS,
    mlp_norm="post_attention_norm",
    heads=UntruncatedHeads(),
    features=(Experts("intermediate_size"), AlternatingWindows()),
)

DIALECTS = (
    *(LLAMA, MISTRAL, MIXTRAL, INTERNLM2, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3),
    *(GEMMA, GEMMA2, GEMMA3, GEMMA4, GRANITE, SMOLLM3, OLMO, OLMO2, PHI, PHI3, COHERE, STABLELM, STARCODER2),
    *(GPT2, GPT_NEOX, FALCON, BLOOM, MPT),
    *(ARCEE, NEMOTRON, JAIS2, OLMOE, HUNYUAN_DENSE, SEED_OSS, ERNIE, ERNIE_MOE, GLM, GLM4, COHERE2, EXAONE4),
    *(LFM2, LFM2_MOE, MINISTRAL3, OLMO3, GPT_OSS, QWEN35, QWEN35_MOE, QWEN3_NEXT, GRANITE_MOE, GLM4_MOE, GLM4_MOE_LITE),
    *(GRANITE_HYBRID, FALCON_H1, NEMOTRON_H, NEMOTRON_H_MOE),
)
"""Those that are written. Where several have a name, a file with it is the first, unless its metadata tell otherwise."""


def dialect_of_file(metadata: Mapping[str, Value], file: str) -> Dialect:
    """Returns the dialect of a file with this metadata. Raises CheckpointError.

    Llama and Mistral are one architecture in a file, which is read as Llama, and so is InternLM 2,
    of which only the stacking of queries, keys and values is different.
    """
    name = metadata.get("general.architecture")
    experts, gating = metadata.get("llama.expert_count"), metadata.get("deepseek2.expert_gating_func")
    match name:
        case "llama" if isinstance(experts, int) and experts > 0:
            return MIXTRAL
        case "deepseek2" if isinstance(gating, int) and gating == SIGMOID:
            return DEEPSEEK_V3
        case "internlm2":
            return _READ_INTERNLM2
        case "olmo2" if "olmo2.attention.sliding_window" in metadata:
            return OLMO3
    found = next((dialect for dialect in DIALECTS if dialect.name == name), None)
    if found is None:
        known = ", ".join(sorted({dialect.name for dialect in DIALECTS}))
        raise CheckpointError(f"{file}: general.architecture {excerpt(name)} is not supported, only {known}")
    return found


def dialect_of_model(model_type: str, file: str, *, sparse: bool = False) -> Dialect:
    """Returns the dialect for a model of this `model_type`; `sparse`: it has experts. Raises CheckpointError."""
    own = sorted((dialect for dialect in DIALECTS if dialect.model_type == model_type), key=lambda each: each.sparse != sparse)
    found = own[0] if own else None
    if found is None:
        known = ", ".join(sorted(dialect.model_type for dialect in DIALECTS))
        raise CheckpointError(f"{file}: model_type {excerpt(model_type)} cannot be written as GGUF, only {known}")
    return found
