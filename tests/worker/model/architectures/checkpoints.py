"""Small random checkpoints of every architecture, which transformers writes.

Shapes are odd on purpose: six heads, a vocabulary that does not divide, windows shorter than a prompt.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

SHAPE = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 251,
    "max_position_embeddings": 256,
}
HEADS = {key: SHAPE[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
DENSE = {**HEADS, "max_position_embeddings": 256, "intermediate_size": 64}
GPT = {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 251, "n_positions": 256}
MPT = {"d_model": 48, "n_layers": 3, "n_heads": 6, "vocab_size": 251, "max_seq_len": 256}
MOE = {**SHAPE, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 16}
USED_WINDOW = {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}
GEMMA = {**SHAPE, "head_dim": 10}
ROPE = {"rope_theta": 500.0, "factor": 4.0}
YARN = {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 64}
LLAMA3 = {
    **ROPE,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.3, 2.0, 3.1],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 128,
}
DEEPSEEK = {
    **DENSE,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "moe_intermediate_size": 24,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 3, "topk_group": 2}
MSCALE = {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6}
FALCON = {**HEADS, "max_position_embeddings": 256, "ffn_hidden_size": 64}
FULL_LAST = ["sliding_attention", "sliding_attention", "full_attention"]
GROWING = {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.2, "mscale": 1.0, "mscale_all_dim": 1.0}
HYBRID = {
    **SHAPE,
    "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 8,
    "shared_intermediate_size": 40,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
}
ERNIE_MOE = {**SHAPE, "moe_k": 2, "moe_num_experts": 5, "moe_intermediate_size": 24, "moe_layer_start_index": 1}
DELTA = {
    **SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
}
DELTA_MOE = {
    **DELTA,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA = {
    **HYBRID,
    "num_local_experts": 0,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
}
FALCON_H1 = {**SHAPE, "mamba_d_ssm": 66, "mamba_d_state": 10, "num_hidden_layers": 2}
FALCON_FACTORS = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.7, 1.6],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.6, 1.2, 0.8, 1.5, 0.7],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.5,
}
NEMOTRON_H = {
    **{key: SHAPE[key] for key in SHAPE if key != "num_hidden_layers"},
    "head_dim": 10,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 1,
    "ssm_state_size": 20,
}
LFM = {**SHAPE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

GEMMA4: dict[str, Any] = {
    "vocab_size": 251,
    "vocab_size_per_layer_input": 251,
    "hidden_size": 60,
    "intermediate_size": 70,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 20,
    "hidden_size_per_layer_input": 7,
    "sliding_window": 13,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("LlamaConfig", {**SHAPE, "rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "llama dynamic": ("LlamaConfig", {**SHAPE, "rope_parameters": {**ROPE, "rope_type": "dynamic"}}),
    "llama llama3": ("LlamaConfig", {**SHAPE, "rope_parameters": LLAMA3}),
    "llama yarn": ("LlamaConfig", {**SHAPE, "rope_parameters": YARN}),
    "llama yarn fractional": ("LlamaConfig", {**SHAPE, "rope_parameters": {**YARN, "truncate": False, "beta_fast": 16}}),
    "mistral": ("MistralConfig", {**SHAPE, **WINDOW}),
    "mistral whole": ("MistralConfig", {**SHAPE, "sliding_window": None, "head_dim": 12, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen2 upper windows": ("Qwen2Config", {**SHAPE, **USED_WINDOW, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SHAPE, "head_dim": 10}),
    "qwen3 biases, windows": ("Qwen3Config", {**SHAPE, **USED_WINDOW, "head_dim": 8, "attention_bias": True}),
    "granite": (
        "GraniteConfig",
        {
            **SHAPE,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": ("SmolLM3Config", {**SHAPE, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3 windows": ("SmolLM3Config", {**SHAPE, **USED_WINDOW, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "olmo": ("OlmoConfig", {**SHAPE, "clip_qkv": 0.6}),
    "olmo2": ("Olmo2Config", SHAPE),
    "olmo2 one key-value head": ("Olmo2Config", {**SHAPE, "num_key_value_heads": 1}),
    "stablelm": ("StableLmConfig", {**SHAPE, "head_dim": 8, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm parallel": (
        "StableLmConfig",
        {**SHAPE, "qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    ),
    "cohere": ("CohereConfig", {**SHAPE, "logit_scale": 0.3, "bos_token_id": 1, "eos_token_id": 2}),
    "cohere norms": ("CohereConfig", {**SHAPE, "use_qk_norm": True, "bos_token_id": 1, "eos_token_id": 2}),
    "starcoder2": ("Starcoder2Config", {**SHAPE, **WINDOW, "bos_token_id": 1, "eos_token_id": 2}),
    "starcoder2 no biases": (
        "Starcoder2Config",
        {**SHAPE, "use_bias": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "phi3": ("Phi3Config", {**SHAPE, **WINDOW, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "phi3 longrope": (
        "Phi3Config",
        {**SHAPE, "rope_parameters": LONG, "pad_token_id": 0, "original_max_position_embeddings": 128},
    ),
    "gemma": ("GemmaConfig", {**GEMMA, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", {**GEMMA, **WINDOW, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            **WINDOW,
            "query_pre_attn_scalar": 7,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt2": ("GPT2Config", {**GPT, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2 by layer": (
        "GPT2Config",
        {
            **GPT,
            "n_inner": 64,
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {**DENSE, "rotary_pct": 0.5}),
    "gpt_neox in turn": (
        "GPTNeoXConfig",
        {**DENSE, "rotary_pct": 0.75, "use_parallel_residual": False, "attention_bias": False},
    ),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "phi": ("PhiConfig", SHAPE),
    "phi norms": ("PhiConfig", {**SHAPE, "qk_layernorm": True, "partial_rotary_factor": 0.75}),
    "opt": ("OPTConfig", {**HEADS, "ffn_dim": 64, "max_position_embeddings": 256, "word_embed_proj_dim": 48}),
    "bloom": ("BloomConfig", {"hidden_size": 48, "n_layer": 3, "n_head": 12, "vocab_size": 251}),
    "falcon one key-value head": ("FalconConfig", {**FALCON, "bias": True, "multi_query": True}),
    "falcon groups": ("FalconConfig", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon groups, one for both ranks": (
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
    ),
    "falcon biases of position": (
        "FalconConfig",
        {**FALCON, "num_attention_heads": 12, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": ("MptConfig", MPT),
    "mpt clipped": ("MptConfig", {**MPT, "n_heads": 12, "attn_config": {"clip_qkv": 0.6, "softmax_scale": 0.3}}),
    "mixtral": ("MixtralConfig", {**MOE, **WINDOW, "num_local_experts": 5}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **MOE,
            "num_experts": 5,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **MOE,
            "num_experts": 5,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "head_dim": 10,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": MSCALE, "n_shared_experts": 1}),
    "deepseek_v2 groups, biases": (
        "DeepseekV2Config",
        {**DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy", "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**DEEPSEEK, **GROUPS, "rope_parameters": MSCALE, "rms_norm_eps": 1e-3}),
    "deepseek_v3 one group, halves": (
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "attention_bias": True,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "n_routed_experts": 5,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "n_shared_experts": 3,
        },
    ),
    "seed_oss": ("SeedOssConfig", {**SHAPE, "head_dim": 10, "attention_out_bias": True, "mlp_bias": True}),
    "helium": ("HeliumConfig", {**SHAPE, "head_dim": 8}),
    "exaone4": ("Exaone4Config", {**SHAPE, **WINDOW, "sliding_window_pattern": 3}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {
            **SHAPE,
            "head_dim": 10,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0},
        },
    ),
    "cwm": ("CwmConfig", {**SHAPE, **WINDOW, "head_dim": 8, "rope_parameters": LLAMA3, "eos_token_id": 2, "bos_token_id": 1}),
    "ministral": ("MinistralConfig", {**SHAPE, **WINDOW, "head_dim": 10, "layer_types": FULL_LAST}),
    "ministral3": ("Ministral3Config", {**SHAPE, "head_dim": 12, "rope_parameters": GROWING}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"}),
    "granitemoehybrid experts": ("GraniteMoeHybridConfig", {**HYBRID, "num_local_experts": 5}),
    "granitemoe": ("GraniteMoeConfig", {**SHAPE, "num_local_experts": 5, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "granitemoeshared": ("GraniteMoeSharedConfig", {**SHAPE, "num_local_experts": 5, "shared_intermediate_size": 40}),
    "olmo3": (
        "Olmo3Config",
        {
            **SHAPE,
            **WINDOW,
            "layer_types": FULL_LAST,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "olmoe": ("OlmoeConfig", {**SHAPE, "num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 1.2}),
    "cohere2": ("Cohere2Config", {**SHAPE, **WINDOW, "layer_types": FULL_LAST, "bos_token_id": 1, "eos_token_id": 2}),
    "glm": ("GlmConfig", {**SHAPE, "head_dim": 12, "pad_token_id": 0, "eos_token_id": 2}),
    "glm4": ("Glm4Config", {**SHAPE, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 2}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **SHAPE,
            **GROUPS,
            "head_dim": 12,
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 24,
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.3,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            **{key: DEEPSEEK[key] for key in DEEPSEEK if key != "first_k_dense_replace"},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {**SHAPE, "head_dim": 10, "use_bias": True}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", ERNIE_MOE),
    "ernie4_5_moe biases": (
        "Ernie4_5_MoeConfig",
        {**ERNIE_MOE, "use_bias": True, "tie_word_embeddings": False, "moe_num_shared_experts": 0, "moe_layer_interval": 2},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **SHAPE,
            "head_dim": 12,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.4,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "arcee": ("ArceeConfig", {**SHAPE, "attention_bias": True, "mlp_bias": True, "bos_token_id": 1, "eos_token_id": 2}),
    "nemotron": ("NemotronConfig", SHAPE),
    "apertus": ("ApertusConfig", {**SHAPE, "attention_bias": True, "eos_token_id": 2, "rope_parameters": LLAMA3}),
    "jais2": ("Jais2Config", {**SHAPE, "eos_token_id": 2}),
    "vaultgemma": ("VaultGemmaConfig", {**GEMMA, **WINDOW, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}),
    "qwen3_5_text": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_text other layers": (
        "Qwen3_5TextConfig",
        {
            **DELTA,
            "attention_bias": True,
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 20,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {key: DELTA_MOE[key] for key in DELTA_MOE if key != "intermediate_size"}),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA_MOE, "mlp_only_layers": [1]}),
    "lfm2": ("Lfm2Config", {**LFM, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "lfm2 several planes": (
        "Lfm2Config",
        {
            **LFM,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "conv_bias": True,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **LFM,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.3,
        },
    ),
    "granitemoehybrid states": ("GraniteMoeHybridConfig", MAMBA),
    "granitemoehybrid states of groups": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "num_local_experts": 5,
            "mamba_n_heads": 6,
            "mamba_n_groups": 3,
            "mamba_d_state": 37,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "hidden_act": "gelu",
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1 states": ("FalconH1Config", {**FALCON_H1, "mamba_n_heads": 6, "mamba_n_groups": 1}),
    "falcon_h1 states, factors": (
        "FalconH1Config",
        {
            **FALCON_H1,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            **FALCON_FACTORS,
        },
    ),
    "falcon_h1 states, norm first": (
        "FalconH1Config",
        {**FALCON_H1, "mamba_n_heads": 3, "mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_conv_bias": False},
    ),
    "nemotron_h states": ("NemotronHConfig", NEMOTRON_H),
    "nemotron_h states, experts": (
        "NemotronHConfig",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "n_routed_experts": 6,
            "n_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.3,
        },
    ),
    "nemotron_h states, biases": (
        "NemotronHConfig",
        {
            **NEMOTRON_H,
            "layers_block_type": ["full_attention", "mlp", "linear_attention", "mlp", "linear_attention"],
            "n_groups": 3,
            "mamba_num_heads": 6,
            "mamba_head_dim": 11,
            "ssm_state_size": 8,
            "conv_kernel": 3,
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "mlp_hidden_act": "gelu",
        },
    ),
    "gemma4_text": ("Gemma4TextConfig", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4_text keys are values": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    "gemma4_text experts": (
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_key_value_heads": 3,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
    ),
    "bamba states": (
        "BambaConfig",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "attn_layer_indices": [1],
            "mamba_n_heads": 6,
            "mamba_n_groups": 3,
            "mamba_d_state": 10,
        },
    ),
}


def at_its_mark(names: Iterable[str]) -> list[Any]:
    """The names as parameters: `lab` for further variants and for rows of what others prove, `long` for the rest."""

    def mark(name: str) -> pytest.MarkDecorator:
        return pytest.mark.lab if " " in name or name in ROWS else pytest.mark.long

    return [pytest.param(name, marks=mark(name)) for name in names]


ROWS = {
    *("seed_oss", "helium", "exaone4", "hunyuan_v1_dense", "cwm", "ministral", "granitemoehybrid", "granitemoeshared", "olmo3"),
    *("olmoe", "cohere2", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "ernie4_5", "ernie4_5_moe", "arcee", "nemotron", "jais2"),
    *("vaultgemma", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next", "apertus"),
}
"""Architectures that are rows of what others have: their keys and schedules are tried in the laboratory."""
CORRECTIONS = ("e_score_correction_bias", "expert_bias", "layer_scalar")
"""Buffers that are weights."""
ADDED_TWICE = {"falcon biases of position"}
"""transformers' eager attention adds Falcon's biases once with the mask and once by itself."""


def with_steps(model: Any) -> Any:
    """The model with steps of Nemotron H as in NVIDIA's own code.

    transformers bounds those of a prompt, but not those of an answer, by `time_step_min`; NVIDIA's all by `time_step_limit`.
    """
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = module.config.time_step_limit
    return model


def write(name: str, seed: int, model_dir: Path) -> Any:
    """A checkpoint of a case."""
    return save(*CASES[name], seed, model_dir, kernel="sdpa" if name in ADDED_TWICE else "eager")


def save(config_class: str, fields: dict[str, Any], seed: int, model_dir: Path, *, kernel: str = "eager") -> Any:
    """A checkpoint of transformers' own; no weight is left at the zeros or ones that it may begin with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.manual_seed(seed)
        config = getattr(transformers, config_class)(**fields)
        model = with_steps(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel).float().eval())
        with torch.no_grad():
            corrections = [x for name, x in model.named_buffers() if name.endswith(CORRECTIONS)]
            for weight in (*model.parameters(), *corrections):
                weight.add_(torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.1))
        model.save_pretrained(model_dir)
    return model
