"""What config.json means: the defaults are transformers' own, every spelling means the same, the unknown is refused by name."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.tools.catalog import page
from ryzanstein.worker.architectures.registry import ARCHITECTURES, context_of, spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec, LongScaling
from ryzanstein.worker.refusal import CheckpointError

REPOSITORY = Path(__file__).parents[4]
SHAPE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
NEEDED = {  # transformers' defaults are none, or an odd half of a head, which it cannot run
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"hidden_size": 6144},
}
KNOWN_TO_TRANSFORMERS = [name for name in ARCHITECTURES if name != "internlm2"]  # that one: test_internlm2
SHORT = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


@pytest.fixture(scope="module")
def defaults() -> dict[str, dict[str, Any]]:
    """transformers' config of each model_type with nothing set, as JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING, logging

        logging.set_verbosity_error()
        return {
            name: json.loads(CONFIG_MAPPING[name](**NEEDED.get(name, {})).to_json_string(use_diff=False)) | {"model_type": name}
            for name in KNOWN_TO_TRANSFORMERS
        }


TOLD_BY_LAYER = ("granitemoehybrid", "lfm2_moe", "bamba")
"""What transformers takes for absent kinds of layers is not served, or does not exist."""


@pytest.mark.parametrize("model_type", TOLD_BY_LAYER)
def test_kinds_of_layers_that_must_be_told_are_asked_for(model_type: str) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    more = {"max_position_embeddings": 128, "intermediate_size": 96, "moe_intermediate_size": 32}
    with pytest.raises(CheckpointError, match=r"layer_types|attn_layer_indices"):
        spec_of({"model_type": model_type, **shape, **more})


@pytest.mark.parametrize("model_type", [name for name in KNOWN_TO_TRANSFORMERS if name not in TOLD_BY_LAYER])
def test_an_absent_key_means_what_transformers_takes_it_for(defaults: dict[str, dict[str, Any]], model_type: str) -> None:
    config, renamed = defaults[model_type], ARCHITECTURES[model_type].renamed
    names = {name for key in SHAPE_KEYS for name in (key, renamed.get(key, key))}
    shape = {name: config[name] for name in names if config.get(name) is not None}
    assert spec_of({"model_type": model_type, **shape}) == spec_of(config)


def changed(config: dict[str, Any], **changes: Any) -> DecoderSpec:
    """The decoder with keys changed; `...` removes one."""
    return spec_of({key: value for key, value in {**config, **changes}.items() if value is not ...})


GEMMA3_NEW = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
GEMMA3_OLD = {
    "rope_parameters": ...,
    "rope_theta": 2e6,
    "rope_local_base_freq": 5e3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FOURFOLD = {"factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32768}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
SPELLINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gemma3_text", {"rope_parameters": GEMMA3_NEW}, GEMMA3_OLD),
    ("gemma3_text", {"layer_types": ...}, {"layer_types": ..., "sliding_window_pattern": 6}),
    ("gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 13}, {"layer_types": ...}),
    (
        "llama",
        {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": YARN},
    ),
    (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": ..., "rotary_emb_base": 2e4, "rotary_pct": 0.5},
    ),
    ("stablelm", {"rope_parameters": ..., "rope_theta": 1e4}, {}),
    ("qwen3_moe", {"num_local_experts": ..., "num_experts": 128}, {"num_local_experts": 128, "num_experts": ...}),
    ("bloom", {"hidden_size": 64}, {"hidden_size": ..., "n_embed": 64}),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", **SHORT}},
        {"rope_scaling": {"type": "su", **SHORT}, "rope_parameters": ...},
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", **SHORT}},
        {"rope_scaling": {"type": "yarn", **SHORT}, "rope_parameters": ...},
    ),
    ("gpt2", {}, {"n_embd": ..., "hidden_size": 768}),
    ("deepseek_v2", {"head_dim": ..., "num_experts": 64, "n_routed_experts": ...}, {}),
    (
        "deepseek_v3",
        {"rope_parameters": {**YARN, **MSCALE, "rope_theta": 1e4}},
        {
            "rope_parameters": ...,
            "rope_theta": 10000,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **MSCALE},
        },
    ),
    ("deepseek_v3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}),
    ("deepseek_v3", {"num_nextn_predict_layers": 2}, {"num_nextn_predict_layers": ..., "num_mtp_layers": 2}),
]


@pytest.mark.parametrize(("model_type", "one", "other"), SPELLINGS)
def test_both_spellings_mean_the_same(
    defaults: dict[str, dict[str, Any]], model_type: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert changed(defaults[model_type], **one) == changed(defaults[model_type], **other)


def test_scores_grow_with_mscale_all_dim(defaults: dict[str, dict[str, Any]]) -> None:
    spec = changed(defaults["deepseek_v3"], rope_parameters={**YARN, **MSCALE})
    assert spec.layers[0].attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(4) + 1) ** 2)


def test_longrope_ends_where_its_first_factors_do(defaults: dict[str, dict[str, Any]]) -> None:
    rope = {"rope_parameters": {"rope_type": "longrope", **SHORT}, "max_position_embeddings": 131072}
    spec = changed(defaults["phi3"], **rope)
    assert spec.context_length == 4096
    assert isinstance(spec.rotaries[0].scaling, LongScaling)
    assert spec.rotaries[0].scaling.attention_factor == pytest.approx(1.190238)


@pytest.mark.parametrize(
    ("card", "context"),
    [
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", **FOURFOLD, **ORIGINAL}}, 131072),  # Qwen 2.5
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", **FOURFOLD, **ORIGINAL}}, 131072),  # Qwen 3
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "yarn", **FOURFOLD, **ORIGINAL}}, 131072),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "yarn", "factor": 2.5}}, 20480),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "yarn", **ORIGINAL}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", **FOURFOLD}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", **FOURFOLD}}, 4096),
        ({"max_position_embeddings": 2**31 - 1, "rope_scaling": {"type": "linear", **FOURFOLD}}, 2**31 - 1),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 131072),
    ],
)
def test_a_context_is_as_long_as_its_card_stretches_it(
    defaults: dict[str, dict[str, Any]], card: dict[str, Any], context: int
) -> None:
    """As in vLLM, but for `dynamic`, which changes the keys in the cache beyond what is served."""
    config = {"rope_parameters": ..., **card}
    assert changed(defaults["qwen2"], **config).context_length == context
    whole = {key: value for key, value in {**defaults["qwen2"], **config}.items() if value is not ...}
    assert context_of(whole) == context, "the text side has the same"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ("gpt2", {"activation_function": "mish"}, "activation_function 'mish' is not supported"),
    ("gemma2", {"hidden_activation": 3}, "hidden_activation 3 is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type 'mrope' is not supported"),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": "x"}}},
        "rope_parameters.full_attention.rope_type 'x'",
    ),
    ("llama", {"rope_parameters": {**YARN, "factor": -1}}, "rope_parameters.factor must be a number above 0"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": "1"}}, "short_factor must be a list of numbers"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor must have 48 numbers"),
    ("phi", {"rope_parameters": {"partial_rotary_factor": 0.52}}, "33 numbers of a head cannot be rotated"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 32}, "layer_types 'chunked_attention' is not supported"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 32 entries"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported, only False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported, only False"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported, only True"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm True is not supported"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln True is not supported, only False"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max 16 is not supported, only 8"),
    ("mpt", {"no_bias": False}, "no_bias False is not supported, only True"),
    ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3 is not supported"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are only 8 experts"),
    ("qwen3_moe", {"mlp_only_layers": "none"}, "mlp_only_layers must be a list of whole numbers"),
    ("granite", {"residual_multiplier": "1"}, "residual_multiplier must be a number above 0"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported, only greedy, group_limited_greedy"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported, only False"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported, only 'softmax'"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group is missing"),
    ("deepseek_v2", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number of at least 0, got -1"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only 'noaux_tc'"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1"),
    ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported, only 128"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp4"}}, "quantization_config is not supported"),
    ("deepseek_v3", {"n_group": 7}, "n_group 7 must divide the 256 experts"),
    ("deepseek_v3", {"n_group": 256}, "n_group 256 must divide the 256 experts"),
    (
        "deepseek_v3",
        {"n_group": 128, "num_experts_per_tok": 9},
        "topk_group is 4 of 128 groups of 2 experts, num_experts_per_tok 9",
    ),
    ("deepseek_v3", {"topk_group": 9}, "topk_group is 9 of 8 groups of 32 experts"),
    ("gemma4_text", {"per_layer_config": {"05": {"head_dim": 128}}}, "per_layer_config.11 differs from that of another layer"),
    ("gemma4_text", {"per_layer_config": {"x": {}}}, "per_layer_config.'x' is not supported, only an object for each of 30"),
    ("gemma4_text", {"per_layer_config": {"9" * 5000: {}}}, "is not supported, only an object for each of 30 layers"),
    ("gemma4_text", {"per_layer_config": {"5": {"sliding_window": 3}}}, "per_layer_config.5.sliding_window is not supported"),
    ("gemma4_text", {"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input is 5, must be at least vocab_size: 262144"),
    (
        "gemma4_text",
        {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0},
        "num_kv_shared_layers is not supported without hidden_size_per_layer_input",
    ),
    ("gemma4_text", {"num_kv_shared_layers": 30}, "num_kv_shared_layers leaves no layer of sliding_attention with keys"),
    ("gemma4_text", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 4096"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
    (
        "gemma4_text",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention.rope_theta is missing",
    ),
    ("nemotron_h", {"mamba_hidden_act": ["silu"]}, "mamba_hidden_act ['silu'] is not supported, only"),
    ("deepseek", {}, "model_type 'deepseek' is not supported"),
]


@pytest.mark.parametrize(("model_type", "changes", "named"), REFUSED)
def test_what_is_not_known_is_refused_by_name(
    defaults: dict[str, dict[str, Any]], model_type: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        changed(defaults.get(model_type, {"model_type": model_type}), **changes)
    assert str(caught.value).startswith("config.json: ")
    assert named in str(caught.value)


def test_the_page_of_models_is_fresh() -> None:
    assert (REPOSITORY / "docs" / "reference" / "architectures.md").read_text() == page()


MAMBA_LAST = {"layer_types": ["full_attention", "mamba"]}
HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", {"block_ffn_dim_multiplier": 1e300}, "block_ffn_dim_multiplier makes an MLP of more than"),
    ("lfm2", {"num_key_value_heads": 1, "num_attention_heads": 1, "head_dim": 2}, "hidden_size .* is more than 64 times"),
    ("lfm2", {"conv_L_cache": 10**6}, "conv_L_cache must be at most 256"),
    ("lfm2", {"layer_types": [{"a": 1}, "conv"]}, "layer_types .* is not known"),
    ("hunyuan_v1_dense", {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 9.0}}, "alpha"),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1e300}}, "alpha"),
    ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "llama_4_scaling_beta"),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "conv"]}, "'conv' is not supported"),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "mamba"]}, "without keys and values is not supported"),
    ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be 5 numbers, got 2"),
    ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp False is not supported"),
    ("nemotron_h", {"layer_types": ["full_attention", "moe"], "moe_latent_size": 8}, "moe_latent_size 8 is not supported"),
    ("nemotron_h", {"layer_types": ["mlp", "mamba"]}, "without keys and values is not supported"),
    ("nemotron_h", {"layer_types": None, "hybrid_override_pattern": "*X"}, "hybrid_override_pattern 'X' is not known"),
    ("granitemoehybrid", {**MAMBA_LAST, "mamba_n_heads": 100}, "mamba_n_heads is 100 of 81 numbers"),
    ("granitemoehybrid", {**MAMBA_LAST, "mamba_n_groups": 3}, "mamba_n_groups is 3, over which 128 heads do not divide"),
    ("granitemoehybrid", {**MAMBA_LAST, "mamba_d_state": 10**6}, "mamba_d_state must be at most 1024"),
    ("granitemoehybrid", {**MAMBA_LAST, "mamba_d_conv": 10**6}, "mamba_d_conv must be at most 64"),
    ("granitemoehybrid", {**MAMBA_LAST, "time_step_limit": [1.0, 0.5]}, "time_step_limit must be two numbers in order"),
    ("granitemoehybrid", {**MAMBA_LAST, "time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit must be two"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), HOSTILE)
def test_numbers_that_would_take_for_ever_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    shape = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 99}
    kinds = ["conv", "full_attention"] if model_type == "lfm2" else ["full_attention"] * 2
    config = {"model_type": model_type, **shape, "max_position_embeddings": 64, "intermediate_size": 96, "layer_types": kinds}
    with pytest.raises(CheckpointError, match=message):
        spec_of({**config, **changes})
