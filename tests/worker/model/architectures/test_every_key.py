"""Every key of every architecture's config class, changed one at a time: the logits must be what transformers then computes, or
the model is refused. Nothing else may happen, and no key of another architecture may be heard.

The checkpoints are tiny: what is tested is what config.json means, not how far numbers carry.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.model.architectures.checkpoints import CORRECTIONS, at_its_mark, with_steps

from ryzanstein.worker.architectures.registry import ARCHITECTURES, read_spec, spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.checkpoints.tying import untied_where_stored
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.refusal import ModelRefused

Change = tuple[str, Any]

NUM_TOKENS, VOCABULARY = 40, 128
LENGTHS = (5, 23, NUM_TOKENS)
MAX_BATCH = 24
BLOCK_SIZE = 4
TOLERANCE = 1e-4
"""Of logits between -10 and 10; greater ones count relatively."""

HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
DENSE = {**HEADS, "intermediate_size": 40, "max_position_embeddings": 256}
SHAPE = {**DENSE, "num_key_value_heads": 2}
WIDE = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 256}
WINDOW = {"sliding_window": 8}
USED_WINDOW = {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}
MOE = {**SHAPE, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    **DENSE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "rope_interleave": True,
}
FALCON = {**HEADS, "ffn_hidden_size": 40, "max_position_embeddings": 256}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
DELTA = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
}
DELTA_EXPERTS = {"num_experts": 5, "shared_expert_intermediate_size": 40}
FALCON_H1 = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mlp_multipliers": [0.7, 1.6],
    "ssm_multipliers": [0.6, 1.2, 0.8, 1.5, 0.7],
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 20.0, "factor": 1.0}
SHARED = {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}

GEMMA4 = {
    **SHAPE,
    **WINDOW,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
BASES: Mapping[str, dict[str, Any]] = {
    "llama": {**SHAPE, "head_dim": 8},
    "llama yarn": {**SHAPE, "rope_parameters": YARN},
    "mistral": {**SHAPE, **WINDOW, "head_dim": 8},
    "qwen2": SHAPE,
    "qwen2 windows": {**SHAPE, **USED_WINDOW, "tie_word_embeddings": True},
    "qwen3": {**SHAPE, "head_dim": 12},
    "qwen3 windows": {**SHAPE, **USED_WINDOW, "head_dim": 8, "attention_bias": True},
    "granite": {**SHAPE, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "smollm3": {**SHAPE, "no_rope_layer_interval": 2},
    "smollm3 windows": {**SHAPE, **USED_WINDOW, "no_rope_layer_interval": 2},
    "olmo": {**SHAPE, "clip_qkv": 0.6},
    "olmo2": SHAPE,
    "stablelm": {
        **SHAPE,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "cohere": {**SHAPE, "logit_scale": 0.3},
    "starcoder2": {**SHAPE, **WINDOW},
    "phi3": {**SHAPE, **WINDOW, "partial_rotary_factor": 0.5},
    "gemma": {**SHAPE, "head_dim": 12},
    "gemma2": {**SHAPE, **WINDOW, "head_dim": 12, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**SHAPE, **WINDOW, "head_dim": 12, "query_pre_attn_scalar": 7, "sliding_window_pattern": 2},
    "gemma4_text": {**GEMMA4, "num_kv_shared_layers": 2},
    "gemma4_text experts": {
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "gpt2": {**GPT, "n_inner": 40},
    "gpt_neox": {**DENSE, "num_attention_heads": 2, "rotary_pct": 0.5},
    "gptj": {**GPT, "rotary_dim": 4},
    "phi": {**WIDE, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "opt": {**HEADS, "ffn_dim": 40, "max_position_embeddings": 256, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    "falcon": {**FALCON, "bias": True},
    "falcon groups": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_seq_len": 256},
    "mixtral": {**MOE, **WINDOW, "num_local_experts": 5, "head_dim": 8},
    "qwen2_moe": {**MOE, "num_experts": 5, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3_moe": {**MOE, "num_experts": 5, "norm_topk_prob": True, "head_dim": 8},
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**DEEPSEEK, "num_nextn_predict_layers": 0},
    "seed_oss": {**SHAPE, "head_dim": 8},
    "helium": {**SHAPE, "head_dim": 8},
    "exaone4": {**SHAPE, **WINDOW, "sliding_window_pattern": 2},
    "exaone4 whole": {**SHAPE, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "hunyuan_v1_dense": {**SHAPE, "head_dim": 8},
    "hunyuan_v1_dense alpha": {**SHAPE, "head_dim": 8, "rope_parameters": ALPHA},
    "cwm": {**SHAPE, **WINDOW, "head_dim": 8},
    "ministral": {**SHAPE, **WINDOW, "head_dim": 8},
    "ministral3": {**SHAPE, "head_dim": 8, "rope_parameters": GROWING},
    "ministral3 windows": {**SHAPE, **WINDOW, "head_dim": 8},
    "granitemoehybrid": {
        **SHAPE,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "layer_types": ["full_attention"] * 2,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    },
    "granitemoehybrid experts": {
        **SHAPE,
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "layer_types": ["full_attention"] * 2,
        "shared_intermediate_size": 24,
        "logits_scaling": 2.0,
    },
    "granitemoehybrid states": {
        **SHAPE,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 40,
        "residual_multiplier": 0.7,
    },
    "granitemoe": {**SHAPE, "num_local_experts": 4, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "granitemoeshared": {**SHAPE, "num_local_experts": 4, "shared_intermediate_size": 24, "embedding_multiplier": 2.0},
    "olmo3": {**SHAPE, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {**SHAPE, "num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 1.5},
    "cohere2": {**SHAPE, **WINDOW, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.3},
    "glm": {**SHAPE, "head_dim": 12},
    "glm4": {**SHAPE, "head_dim": 12},
    "glm4_moe": {**MOE, **SHARED, "first_k_dense_replace": 1, "use_qk_norm": True, "head_dim": 12},
    "glm4_moe_lite": {**{key: DEEPSEEK[key] for key in DEEPSEEK if key != "first_k_dense_replace"}},
    "ernie4_5": {**SHAPE, "head_dim": 8, "use_bias": True},
    "ernie4_5_moe": {**SHAPE, "moe_k": 2, "moe_num_experts": 5, "moe_intermediate_size": 24, "tie_word_embeddings": False},
    "ernie4_5_moe biases": {
        **SHAPE,
        "moe_k": 2,
        "moe_num_experts": 5,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 0,
        "moe_layer_interval": 2,
        "moe_num_shared_experts": 0,
        "use_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen3_5_text": {**SHAPE, **DELTA},
    "qwen3_5_text kinds": {**SHAPE, **DELTA, "layer_types": ["linear_attention", "full_attention"], "attention_bias": True},
    "qwen3_5_moe_text": {**{key: MOE[key] for key in MOE if key != "intermediate_size"}, **DELTA, **DELTA_EXPERTS},
    "qwen3_next": {**MOE, **DELTA, **DELTA_EXPERTS},
    "qwen3_next dense layer": {**MOE, **DELTA, **DELTA_EXPERTS, "decoder_sparse_step": 2},
    "lfm2": {**SHAPE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2 first names": {
        **{key: SHAPE[key] for key in SHAPE if key != "intermediate_size"},
        "full_attn_idxs": [1],
        "block_ff_dim": 60,
        "block_multiple_of": 16,
        "conv_bias": True,
    },
    "lfm2_moe": {
        **MOE,
        "layer_types": ["conv", "full_attention"],
        "num_experts": 5,
        "num_dense_layers": 1,
        "moe_intermediate_size": 24,
    },
    "arcee": SHAPE,
    "nemotron": {**SHAPE, "partial_rotary_factor": 0.5},
    "jais2": {**SHAPE, "head_dim": 8},
    "apertus": SHAPE,
    "gpt_oss": {**SHAPE, **WINDOW, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.5},
    "nemotron_h": {
        **{key: SHAPE[key] for key in SHAPE if key != "num_hidden_layers"},
        "head_dim": 8,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 12,
    },
    "falcon_h1": {**SHAPE, **FALCON_H1},
    "bamba": {**SHAPE, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 10},
    "falcon_h1 norms": {**SHAPE, **FALCON_H1, "mamba_rms_norm": True, "attention_bias": True, "projectors_bias": True},
    "nemotron_h experts": {
        **{key: SHAPE[key] for key in SHAPE if key != "num_hidden_layers"},
        "head_dim": 8,
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 12,
        "n_routed_experts": 6,
        "n_group": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
    "vaultgemma": {**SHAPE, **WINDOW, "head_dim": 12, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0},
}

ROPES: list[Any] = [
    None,
    {},
    {"rope_theta": 50.0},
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 4.0},
    YARN,
    {**YARN, "factor": None},
    {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    {**YARN, "original_max_position_embeddings": None},
    {"rope_type": "yarn", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    ALPHA,
    {**ALPHA, "alpha": 0},
    GROWING,
    {**GROWING, "llama_4_scaling_beta": 0.8},
    {"rope_type": "other", "factor": 2.0},
    {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_theta": 100.0}},
]
ROPES += [
    {"rope_type": "longrope", "short_factor": [1.5] * count, "long_factor": [3.0] * count, "factor": 2.0} for count in (2, 4, 6)
]
KINDS: list[Any] = [
    None,
    ["full_attention", "full_attention"],
    ["sliding_attention", "sliding_attention"],
    ["sliding_attention", "full_attention"],
    ["full_attention", "sliding_attention"],
    ["full_attention"],
    ["chunked_attention", "full_attention"],
    "full_attention",
]
DELTA_KINDS = [["linear_attention", "full_attention"], ["full_attention", "linear_attention"], ["linear_attention"] * 2]
MAMBA_KINDS = [["mamba", "attention"], ["attention", "attention"], ["mamba", "full_attention"], ["hybrid", "hybrid"]]
ACTS = [
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
    "mish",
    "relu2",
    "nothing",
    None,
]
OTHERS: Mapping[str, list[Any]] = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "layer_types": [
        *KINDS,
        ["conv", "conv"],
        ["full_attention", "conv"],
        ["conv", "full_attention"],
        *DELTA_KINDS,
        *MAMBA_KINDS,
    ],
    "hidden_act": ACTS,
    "hidden_activation": ACTS,
    "activation": ACTS,
    "activation_function": ACTS,
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "attn_config": [{"clip_qkv": 0.5}, {"softmax_scale": 0.5}, {"alibi": False}, {"qk_ln": True}, {"alibi_bias_max": 16}],
    "mlp_only_layers": [[], [0], [0, 1], None, [-1], [7]],
    "no_rope_layers": [[1, 1], [0, 0], [0, 1], [1], None],
    "layers_block_type": [*KINDS, *MAMBA_KINDS, ["mamba", "attention", "mlp", "mlp"], ["mlp", "mlp"]],
    "hybrid_override_pattern": ["M*-", "-M*", "*"],
    "mamba_hidden_act": ACTS,
    "mlp_hidden_act": ACTS,
    "full_attn_idxs": [[0], [1], [0, 1], [], None],
    "mlp_layer_types": [["sparse", "sparse"], ["dense", "dense"], ["sparse"], ["other", "sparse"], None],
    "position_embedding_type": ["rope", "nope", None],
    "mamba_d_head": ["auto", 8, 9, None],
    "attn_layer_indices": [[0], [0, 1], [], [7], None],
    "mamba_d_ssm": [None, 48, 64, 63],
    "mlp_multipliers": [[0.5, 1.6], [0.7, 0.9], [1.0], None],
    "ssm_multipliers": [*([2.0 if part == each else 0.7 for part in range(5)] for each in range(5)), [1.0] * 4, None],
    "time_step_limit": [[0.9, 1.1], [0.0, 0.3], [0.5, 0.2], [0.1], "all", None],
    "sliding_window_pattern": [1, 2, 3, "LLLG", None],
    # Of keys that are there and not read transformers says so, which counts as no answer: `checkpoints.py` has them.
    "num_kv_shared_layers": [0, 4, 9, None],
    "per_layer_config": [{"0": {"num_key_value_heads": 1}}, {}],
    "eos_token_id": [[1, 2], 3, None],
    "dtype": ["float16", None],
    "torch_dtype": ["float16"],
    "norm_type": ["layernorm"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "architectures": [None, ["Other"]],
    "quantization_config": [None, {}],
    "_remove_final_layer_norm": [True],
}
FOREIGN: Mapping[str, list[Any]] = {
    "rope_theta": [50.0, 50],
    "rotary_emb_base": [50.0],
    "rope_local_base_freq": [50.0],
    "partial_rotary_factor": [0.5],
    "rotary_pct": [0.25],
    "rotary_dim": [2],
    "original_max_position_embeddings": [16, 32],
    "rope_parameters": [{"rope_theta": 50.0}],
    "rope_scaling": [{"type": "linear", "factor": 4.0}, None, {}],
    "is_causal": [False, True],
    "rms_norm_eps": [0.3],
    "layer_norm_eps": [0.3],
    "layer_norm_epsilon": [0.3],
    "norm_epsilon": [0.3],
    "norm_eps": [0.3],
    "hidden_act": ["relu"],
    "hidden_activation": ["relu", "gelu"],
    "activation": ["relu"],
    "activation_function": ["relu"],
    "layer_types": [["sliding_attention", "full_attention"]],
    "sliding_window": [4],
    "use_sliding_window": [True],
    "max_window_layers": [0],
    "sliding_window_pattern": [1],
    "attn_logit_softcapping": [1.0],
    "final_logit_softcapping": [1.0],
    "query_pre_attn_scalar": [3],
    "attention_multiplier": [0.9],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.5],
    "logits_scaling": [3.0],
    "logit_scale": [0.5],
    "clip_qkv": [0.3],
    "head_dim": [16],
    "num_key_value_heads": [1],
    "num_kv_heads": [1],
    "intermediate_size": [48],
    "n_inner": [48],
    "ffn_dim": [48],
    "attention_bias": [True],
    "mlp_bias": [True],
    "qkv_bias": [True],
    "use_qkv_bias": [True],
    "bias": [True],
    "use_bias": [False],
    "no_bias": [False],
    "enable_bias": [False],
    "qk_layernorm": [True],
    "use_qk_norm": [True],
    "qk_norm": [True],
    "tie_word_embeddings": [True, False, None],
    "scale_attn_weights": [False],
    "scale_attn_by_inverse_layer_idx": [True],
    "reorder_and_upcast_attn": [True],
    "multi_query": [False],
    "alibi": [True],
    "use_parallel_residual": [True, False],
    "parallel_attn": [False],
    "no_rope_layers": [[0, 1]],
    "no_rope_layer_interval": [1],
    "use_bidirectional_attention": [True],
    "norm_topk_prob": [True],
    "num_experts": [4],
    "num_local_experts": [4],
    "rope_interleave": [False],
    "routed_scaling_factor": [2.0],
    "is_decoder": [True],
    "is_encoder_decoder": [True],
    "add_cross_attention": [True],
    "chunk_size_feed_forward": [2],
    "pretraining_tp": [2],
    "return_dict": [False],
    "num_labels": [3],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "use_cache": [False],
    "per_layer_config": [{"0": {"num_key_value_heads": 1}}],
    "no_such_key": [1],
}
"""Keys of other architectures, or older ones, beside those of its own."""


def changes(base: Mapping[str, Any]) -> Iterator[Change]:
    """Every key of its own to every other value, then keys that are not its own."""
    for key, value in base.items():
        if key not in ("model_type", "transformers_version"):
            yield from ((key, other) for other in others(key, value) if other != value or type(other) is not type(value))
    for key, values in FOREIGN.items():
        yield from ((key, value) for value in values if key not in base or base[key] is None)


def others(key: str, value: Any) -> list[Any]:
    """Plausible other values for a key, by its name or by the kind of its value; `...` leaves the key out."""
    if key in OTHERS:
        return [..., *OTHERS[key]]
    if isinstance(value, bool):
        return [..., not value, None]
    if isinstance(value, int):
        return [..., value + 1, value - 1, 2 * value, None]
    if isinstance(value, float):
        return [..., 2 * value + 0.25, value / 2, None]
    return [..., 2, True, 0.5] if value is None else [..., "other", None]


@dataclass(frozen=True)
class Checkpoint:
    """A directory, its config.json as it was written, and the tokens that are fed."""

    directory: Path
    config: Mapping[str, Any]
    ids: list[int]

    def write(self, changes: Mapping[str, Any]) -> None:
        """config.json with keys changed; `...` leaves one out."""
        changed = {**self.config, **changes}
        text = json.dumps({name: value for name, value in changed.items() if value is not ...})
        (self.directory / "config.json").write_text(text)


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    """transformers, without what it prints and warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity(100)
        transformers.logging.disable_progress_bar()
        yield transformers


def new_checkpoint(name: str, directory: Path) -> Checkpoint:
    """No weight is left at the zeros or ones that it may begin with."""
    with quiet() as transformers:
        torch.manual_seed(7)
        config = transformers.CONFIG_MAPPING[name.split(" ", maxsplit=1)[0]](**{**TOKENS, **BASES[name]})
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            corrections = [x for name, x in model.named_buffers() if name.endswith(CORRECTIONS)]
            for weight in (*model.parameters(), *corrections):
                weight.add_(torch.randn_like(weight) * (0.25 if weight.dim() > 1 else 0.1))
        model.save_pretrained(directory)
        text = json.loads(config.to_json_string(use_diff=False))
    ids = torch.randint(3, VOCABULARY, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    written = json.loads((directory / "config.json").read_text())
    return Checkpoint(directory, {**text, **written}, ids)


@torch.inference_mode()
def theirs(checkpoint: Checkpoint) -> torch.Tensor | None:
    """transformers' logits after each length; None where it cannot load all of the checkpoint, or not run it."""
    # transformers' eager attention adds Falcon's biases once with the mask and once by itself.
    attention = "sdpa" if checkpoint.config["model_type"] == "falcon" else "eager"
    with quiet() as transformers, contextlib.suppress(Exception):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.directory, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
        if any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")):
            return None
        logits = with_steps(model).eval()(torch.tensor([checkpoint.ids]))[0][0].float()
        return logits[[length - 1 for length in LENGTHS]] if logits.isfinite().all() else None
    return None


def ours(checkpoint: Checkpoint, runner: Callable[..., Any]) -> torch.Tensor | str:
    """Our logits after the lengths that the context holds, or why the checkpoint is refused."""
    try:
        loaded = runner(checkpoint.directory, kernels="torch", block_size=BLOCK_SIZE, num_blocks=40)
    except ModelRefused as refusal:
        return str(refusal)
    lengths = [length for length in LENGTHS if length <= loaded.context_length]
    tables = [list(range(10 * index, 10 * index + 10)) for index in range(len(lengths))]
    tokens = [token for length in lengths for token in checkpoint.ids[:length]]
    logits: torch.Tensor = loaded.hidden_logits(
        StepPlan(1, tokens, lengths, [0] * len(lengths), tables, list(range(len(lengths))))
    )
    return logits


def alike(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    if other is None:
        return False
    bound = TOLERANCE * max(1.0, one.abs().max().item() / 10)
    return bool((one - other[: len(one)]).abs().max() <= bound) if len(one) else True


def same(value: Any) -> list[Any]:
    """The value as transformers may want it written: it takes no null and no whole number where it wants another kind."""
    return [...] if value is None else [float(value)] if type(value) is int else []


@dataclass(frozen=True)
class Judge:
    """Compares what a change does here and there."""

    checkpoint: Checkpoint
    runner: Callable[..., Any]
    base: DecoderSpec
    logits: torch.Tensor

    def own_spec(self, changed: Mapping[str, Any]) -> DecoderSpec | None:
        """None where it is refused."""
        try:
            return spec_of({key: value for key, value in {**self.checkpoint.config, **changed}.items() if value is not ...})
        except ModelRefused:
            return None

    def wrong(self, pending: Sequence[Change]) -> Iterator[str]:
        """What differs. Nothing but the DecoderSpec leads from config.json to a logit: changes that leave it alone are tried
        together, and apart where transformers then answers otherwise."""
        idle = [change for change in pending if self.own_spec(dict([change])) == self.base]
        yield from self._wrong_idle(idle)
        for change in pending:
            if change not in idle and self.own_spec(dict([change])) is not None:
                yield from self._wrong_single(*change)

    def _wrong_idle(self, pending: Sequence[Change]) -> Iterator[str]:
        for batch in _batches(pending):
            self.checkpoint.write(dict(batch))
            if alike(self.logits, theirs(self.checkpoint)):
                continue
            if len(batch) == 1:
                yield from self._wrong_single(*batch[0])
            else:
                half = len(batch) // 2
                yield from self._wrong_idle(batch[:half])
                yield from self._wrong_idle(batch[half:])

    def _wrong_single(self, key: str, value: Any) -> Iterator[str]:
        self.checkpoint.write({key: value})
        own, reference = ours(self.checkpoint, self.runner), theirs(self.checkpoint)
        if isinstance(own, str) or alike(own, reference):
            return
        if reference is not None:
            yield f"{key} {value!r}: {(own - reference[: len(own)]).abs().max():.1e} from transformers"
        elif not alike(own, self.logits) and not any(self._equals(own, key, other) for other in same(value)):
            yield f"{key} {value!r}: served, transformers has no answer"

    def _equals(self, own: torch.Tensor, key: str, value: Any) -> bool:
        self.checkpoint.write({key: value})
        return alike(own, theirs(self.checkpoint))


def _batches(pending: Sequence[Change]) -> Iterator[list[Change]]:
    """One change of a key in each, so that all of a batch hold."""
    rest = list(pending)
    while rest:
        chosen = {change[0]: change for change in reversed(rest)}
        yield (batch := list(chosen.values())[:MAX_BATCH])
        rest = [change for change in rest if not any(change is taken for taken in batch)]


@pytest.fixture
def judge(tmp_path: Path, runner: Callable[..., Any]) -> Callable[[str], Judge]:
    """A checkpoint on which both agree."""

    def open_case(name: str) -> Judge:
        checkpoint = new_checkpoint(name, tmp_path)
        checkpoint.write({})
        reference, own = theirs(checkpoint), ours(checkpoint, runner)
        assert reference is not None
        assert not isinstance(own, str), own
        assert alike(own, reference)
        return Judge(checkpoint, runner, read_spec(tmp_path), reference)

    return open_case


def test_every_architecture_is_here() -> None:
    assert {name.split(" ", 1)[0] for name in BASES} == set(ARCHITECTURES) - {"internlm2"}  # which transformers lacks


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", at_its_mark(BASES))
def test_every_key_does_what_it_does_in_transformers(judge: Callable[[str], Judge], name: str) -> None:
    case = judge(name)
    pending = list(changes(case.checkpoint.config))
    assert len(pending) > 150
    assert list(case.wrong(pending)) == []


OVERLOOKED: list[tuple[str, str, Any]] = [
    ("gemma", "hidden_act", "gelu"),
    ("gemma3_text", "attn_logit_softcapping", 0.5),
    ("gemma3_text", "rope_parameters", {"rope_type": "linear", "factor": 4.0}),
    *((name, "partial_rotary_factor", 0.5) for name in ("llama", "mistral", "qwen2", "qwen3_moe", "mixtral", "cohere")),
    *((name, "partial_rotary_factor", 0.5) for name in ("falcon", "gemma", "olmo", "smollm3")),
    ("llama", "rotary_dim", 2),
    ("gptj", "rope_theta", 50.0),
    ("gptj", "rope_scaling", {"type": "linear", "factor": 4.0}),
    ("olmo", "rms_norm_eps", 0.3),
    ("opt", "rms_norm_eps", 0.3),
    ("bloom", "hidden_act", "relu"),
    ("mpt", "hidden_act", "relu"),
    ("starcoder2", "layer_types", ["sliding_attention", "full_attention"]),
    ("phi3", "layer_types", ["sliding_attention", "full_attention"]),
    ("mixtral", "layer_types", ["sliding_attention", "full_attention"]),
    ("gpt2", "head_dim", 16),
    ("bloom", "num_key_value_heads", 1),
]


@pytest.mark.parametrize(("name", "key", "value"), OVERLOOKED)
def test_what_transformers_overlooks_is_overlooked(judge: Callable[[str], Judge], name: str, key: str, value: Any) -> None:
    case = judge(name)
    case.checkpoint.write({key: value})
    assert alike(case.logits, theirs(case.checkpoint))
    own = ours(case.checkpoint, case.runner)
    assert not isinstance(own, str), own
    assert alike(own, case.logits)


@pytest.mark.parametrize("table", [None, {}, {"rope_theta": 50.0}, YARN])
def test_rope_scaling_counts_before_rope_parameters(judge: Callable[[str], Judge], table: Any) -> None:
    case = judge("llama")
    case.checkpoint.write({"rope_parameters": table, "rope_scaling": {"type": "linear", "factor": 4.0}})
    own = ours(case.checkpoint, case.runner)
    assert not isinstance(own, str), own
    assert alike(own, theirs(case.checkpoint))
    assert not alike(own, case.logits)


@pytest.mark.parametrize("name", BASES)
def test_attention_that_looks_ahead_is_refused(judge: Callable[[str], Judge], name: str) -> None:
    case = judge(name)
    case.checkpoint.write({"is_causal": False})
    assert "is_causal false is not supported" in str(ours(case.checkpoint, case.runner))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "cohere"])
def test_a_head_that_is_stored_counts_before_one_that_is_tied(judge: Callable[[str], Judge], name: str) -> None:
    """transformers 5 warns, and takes the stored one where it is another than the embedding."""
    case = judge(name)
    directory = case.checkpoint.directory
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(3))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    case.checkpoint.write({"tie_word_embeddings": True})
    own, reference = ours(case.checkpoint, case.runner), theirs(case.checkpoint)
    assert not isinstance(own, str), own
    assert alike(own, reference)
    assert not alike(own, case.logits)


def test_a_head_that_is_stored_and_is_the_embedding_stays_tied(judge: Callable[[str], Judge]) -> None:
    case = judge("llama")
    path = case.checkpoint.directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    case.checkpoint.write({"tie_word_embeddings": True})
    assert untied_where_stored(spec := read_spec(path.parent), read_tensor_files(path.parent)) is spec
    own = ours(case.checkpoint, case.runner)
    assert not isinstance(own, str), own
    assert alike(own, theirs(case.checkpoint))
