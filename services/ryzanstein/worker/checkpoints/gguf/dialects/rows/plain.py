"""Architectures whose layers keep keys and values alone."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.experts import ErnieExperts, Experts
from ryzanstein.worker.checkpoints.gguf.dialects.heads import (
    GemmaWindows,
    GrowingHeads,
    PartlyRotatedHeads,
    PlainHeads,
    UntruncatedHeads,
)
from ryzanstein.worker.checkpoints.gguf.dialects.latents import SIGMOID, SOFTMAX, DeepseekExperts, LatentHeads
from ryzanstein.worker.checkpoints.gguf.dialects.layers import LayerHeads
from ryzanstein.worker.checkpoints.gguf.dialects.rows.common import (
    ATTENTION_BIAS,
    NO_BIAS,
    PARTLY,
    QUERY_BIAS,
    SILU,
    SPARSE,
    SQUARE,
    SQUARED,
    TANH_GELU,
    UNTIED,
)
from ryzanstein.worker.checkpoints.gguf.dialects.shapes import (
    AlternatingWindows,
    FalconGeneration,
    MptAttention,
    ParallelHalves,
    PatternWindows,
)

LLAMA = Dialect(
    "llama",
    "llama",
    "LlamaForCausalLM",
    permuted=True,
    fixed=SILU,
    present={**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
)
MISTRAL = Dialect("llama", "mistral", "MistralForCausalLM", permuted=True, fixed={**SILU, "sliding_window": None})
MIXTRAL = Dialect(
    "llama",
    "mixtral",
    "MixtralForCausalLM",
    permuted=True,
    fixed={**SILU, "sliding_window": None},
    features=(Experts(),),
)
INTERNLM2 = Dialect(
    "internlm2",
    "internlm2",
    "InternLM2ForCausalLM",
    permuted=True,
    split_qkv=True,
    fixed={**SILU, **UNTIED, "bias": False},
    heads=SQUARE,
)
READ_INTERNLM2 = replace(LLAMA, name="internlm2", fixed={**SILU, **UNTIED, **NO_BIAS}, present={})
QWEN2 = Dialect("qwen2", "qwen2", "Qwen2ForCausalLM", fixed={**SILU, "use_sliding_window": False}, heads=SQUARE)
QWEN3 = Dialect("qwen3", "qwen3", "Qwen3ForCausalLM", fixed={**SILU, "use_sliding_window": False}, present=ATTENTION_BIAS)
QWEN2_MOE = Dialect(
    "qwen2moe",
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    fixed={**SILU, **UNTIED, **SPARSE, "norm_topk_prob": False},
    present={"qkv_bias": QUERY_BIAS},
    heads=SQUARE,
    features=(Experts("moe_intermediate_size", shared=True),),
)
QWEN3_MOE = Dialect(
    "qwen3moe",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    fixed={**SILU, **SPARSE, "norm_topk_prob": True},
    present=ATTENTION_BIAS,
    features=(Experts("moe_intermediate_size"),),
)
DEEPSEEK_V2 = Dialect(
    "deepseek2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    fixed={**SILU, **NO_BIAS},
    heads=LatentHeads(),
    features=(Experts("moe_intermediate_size"), DeepseekExperts(SOFTMAX)),
)
DEEPSEEK_V3 = Dialect(
    "deepseek2",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    fixed={**SILU, **NO_BIAS},
    heads=LatentHeads(),
    features=(Experts("moe_intermediate_size"), DeepseekExperts(SIGMOID)),
)
GEMMA = Dialect("gemma", "gemma", "GemmaForCausalLM", plus_one=True, fixed=TANH_GELU)
GEMMA2 = Dialect(
    "gemma2",
    "gemma2",
    "Gemma2ForCausalLM",
    plus_one=True,
    scalars={"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
    assumed={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fixed=TANH_GELU,
    features=(GemmaWindows(period=2, usual=4096, largest=46),),
)
GEMMA3 = Dialect(
    "gemma3",
    "gemma3_text",
    "Gemma3ForCausalLM",
    plus_one=True,
    scalars={"final_logit_softcapping": "final_logit_softcapping"},
    assumed={"final_logit_softcapping": None},
    fixed=TANH_GELU,
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
    fixed={**SILU, "mlp_bias": False},
    present=ATTENTION_BIAS,
)
SMOLLM3 = Dialect(
    "smollm3",
    "smollm3",
    "SmolLM3ForCausalLM",
    permuted=True,
    fixed={**SILU, "no_rope_layer_interval": 4, "use_sliding_window": False, "mlp_bias": False},
    present=ATTENTION_BIAS,
)
OLMO = Dialect(
    "olmo",
    "olmo",
    "OlmoForCausalLM",
    permuted=True,
    layer_norm=True,
    scalars={"clip_qkv": "attention.clamp_kqv"},
    assumed={"clip_qkv": None},
    fixed={**SILU, "attention_bias": False},
    heads=SQUARE,
)
OLMO2 = Dialect("olmo2", "olmo2", "Olmo2ForCausalLM", fixed=SILU, present=ATTENTION_BIAS)
PHI = Dialect(
    "phi2",
    "phi",
    "PhiForCausalLM",
    layer_norm=True,
    fixed={**UNTIED, "hidden_act": "gelu_new", "qk_layernorm": False},
    heads=PartlyRotatedHeads(),
)
PHI3 = Dialect("phi3", "phi3", "Phi3ForCausalLM", fixed={**SILU, "sliding_window": None})
COHERE = Dialect(
    "command-r",
    "cohere",
    "CohereForCausalLM",
    layer_norm=True,
    scalars={"logit_scale": "logit_scale"},
    fixed={**SILU, "attention_bias": False},
    present={"use_qk_norm": "blk.0.attn_q_norm.weight"},
)
STABLELM = Dialect(
    "stablelm",
    "stablelm",
    "StableLmForCausalLM",
    layer_norm=True,
    fixed={**SILU, **UNTIED},
    present={"use_qkv_bias": QUERY_BIAS, "qk_layernorm": "blk.0.attn_q_norm.weight"},
    absent={"use_parallel_residual": "blk.0.ffn_norm.weight"},
    heads=PartlyRotatedHeads(),
)
STARCODER2 = Dialect(
    "starcoder2",
    "starcoder2",
    "Starcoder2ForCausalLM",
    layer_norm=True,
    fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
    present={"use_bias": QUERY_BIAS},
    heads=SQUARE,
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
    fixed={**UNTIED, "hidden_act": "gelu", "attention_bias": True},
    heads=PartlyRotatedHeads(),
    features=(ParallelHalves(),),
)
FALCON = Dialect(
    "falcon",
    "falcon",
    "FalconForCausalLM",
    layer_norm=True,
    fixed={"hidden_act": "gelu", "bias": False, "alibi": False, "parallel_attn": True},
    heads=SQUARE,
    features=(FalconGeneration(),),
)
BLOOM = Dialect("bloom", "bloom", "BloomForCausalLM", layer_norm=True, heads=PlainHeads())
MPT = Dialect("mpt", "mpt", "MptForCausalLM", layer_norm=True, heads=PlainHeads(), features=(MptAttention(),))
ARCEE = Dialect(
    "arcee",
    "arcee",
    "ArceeForCausalLM",
    permuted=True,
    fixed=SQUARED,
    present={**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
)
NEMOTRON = Dialect(
    "nemotron",
    "nemotron",
    "NemotronForCausalLM",
    layer_norm=True,
    plus_one=True,
    fixed=SQUARED,
    present={**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
    heads=PartlyRotatedHeads(),
)
JAIS2 = Dialect(
    "jais2",
    "jais2",
    "Jais2ForCausalLM",
    layer_norm=True,
    fixed=SQUARED,
    present={**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
)
OLMOE = Dialect(
    "olmoe",
    "olmoe",
    "OlmoeForCausalLM",
    fixed={**SILU, "norm_topk_prob": False, "attention_bias": False, "clip_qkv": None},
    heads=SQUARE,
    features=(Experts(),),
)
HUNYUAN_DENSE = Dialect(
    "hunyuan-dense",
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    fixed={**SILU, "attention_bias": False},
)
SEED_OSS = Dialect(
    "seed_oss",
    "seed_oss",
    "SeedOssForCausalLM",
    fixed={**SILU, "mlp_bias": False, "attention_out_bias": False},
    present=ATTENTION_BIAS,
    mlp_norm="post_attention_norm",
)
ERNIE = Dialect("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", fixed=SILU, present={"use_bias": QUERY_BIAS})
GLM = Dialect("chatglm", "glm", "GlmForCausalLM", fixed=SILU, present=ATTENTION_BIAS, heads=PARTLY)
GLM4 = Dialect("glm4", "glm4", "Glm4ForCausalLM", fixed=SILU, present=ATTENTION_BIAS, heads=PARTLY)
COHERE2 = Dialect(
    "cohere2",
    "cohere2",
    "Cohere2ForCausalLM",
    layer_norm=True,
    scalars={"logit_scale": "logit_scale"},
    fixed={**SILU, "attention_bias": False},
    heads=SQUARE,
    features=(PatternWindows(),),
)
EXAONE4 = Dialect("exaone4", "exaone4", "Exaone4ForCausalLM", fixed=SILU, features=(PatternWindows(layers=64),))
ERNIE_MOE = replace(
    ERNIE,
    name="ernie4_5-moe",
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    heads=SQUARE,
    features=(Experts("moe_intermediate_size"), ErnieExperts()),
)
MINISTRAL3 = Dialect(
    "mistral3",
    "ministral3",
    "Ministral3ForCausalLM",
    permuted=True,
    fixed={**SILU, "sliding_window": None},
    heads=GrowingHeads(),
)
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    fixed=SILU,
    features=(Experts(),),
)
GLM4_MOE = Dialect(
    "glm4moe",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    fixed=SILU,
    present={**ATTENTION_BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
    mlp_norm="post_attention_norm",
    heads=PARTLY,
    features=(Experts("moe_intermediate_size"), DeepseekExperts(SIGMOID)),
)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, model_type="glm4_moe_lite", class_name="Glm4MoeLiteForCausalLM")
OLMO3 = replace(OLMO2, model_type="olmo3", class_name="Olmo3ForCausalLM", features=(PatternWindows(),))
GPT_OSS = Dialect(
    "gpt-oss",
    "gpt_oss",
    "GptOssForCausalLM",
    fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    present=ATTENTION_BIAS,
    mlp_norm="post_attention_norm",
    heads=UntruncatedHeads(),
    features=(Experts("intermediate_size"), AlternatingWindows()),
)
