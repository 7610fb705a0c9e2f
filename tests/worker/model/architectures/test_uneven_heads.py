"""Heads that do not divide over the ranks: the answers of two, three and four ranks are those of transformers all the same.

Key-value heads are dealt whole, or ranks are dealt to them where there are fewer; MLP columns in unequal counts.
"""

from typing import Any

import pytest
from tests.worker.model.architectures.checkpoints import (
    DEEPSEEK,
    DENSE,
    FALCON,
    FALCON_H1,
    GEMMA4,
    GPT,
    GROUPS,
    LFM,
    MAMBA,
    MOE,
    SHAPE,
    save,
)
from tests.worker.model.architectures.test_architectures import OPTIONS, Case, case_of, logit_differences
from tests.worker.model.rank_processes import answers_of_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.long]

NINE = {**SHAPE, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
EIGHT = {**SHAPE, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
OWN = {**GEMMA4, "num_attention_heads": 8, "num_key_value_heads": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
BESIDE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "9 heads of 3": ("LlamaConfig", {**NINE, "attention_bias": True, "mlp_bias": True}, (2, 4)),
    "8 heads of 2": ("LlamaConfig", EIGHT, (3,)),
    "6 heads of 3": ("LlamaConfig", {**SHAPE, "num_key_value_heads": 3}, (4,)),
    "grouped": ("GPTNeoXConfig", {**DENSE, "hidden_size": 72, "num_attention_heads": 9, "rotary_pct": 0.5}, (2,)),
    "stacked": ("Phi3Config", {**NINE, "pad_token_id": 0}, (2,)),
    "stacked and transposed": ("GPT2Config", {**GPT, **ENDS, "n_embd": 72, "n_head": 9}, (2,)),
    "biases of position": ("BloomConfig", {"hidden_size": 72, "n_layer": 3, "n_head": 9, "vocab_size": 251}, (2,)),
    "a norm for each head": ("CohereConfig", {**NINE, **ENDS, "use_qk_norm": True}, (2, 4)),
    "a norm over all heads": ("Olmo2Config", {**EIGHT, "num_key_value_heads": 8}, (3,)),
    "a norm over all heads, replicated": ("Olmo2Config", EIGHT, (3,)),
    "groups": (
        "FalconConfig",
        {**FALCON, "hidden_size": 64, "num_attention_heads": 8, "new_decoder_architecture": True, "num_kv_heads": 2},
        (3,),
    ),
    "latents": ("DeepseekV3Config", {**DEEPSEEK, **GROUPS, "num_attention_heads": 16, "num_key_value_heads": 16}, (3,)),
    "convolutions": ("Lfm2Config", {**LFM, **NINE, "layer_types": ["conv", "full_attention", "conv"]}, (2,)),
    "experts": (
        "Qwen2MoeConfig",
        {**MOE, **NINE, "num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 41},
        (2, 3),
    ),
    "states of one group": ("GraniteMoeHybridConfig", MAMBA, (3, 4)),
    "states of two groups": ("GraniteMoeHybridConfig", {**MAMBA, "mamba_n_heads": 6, "mamba_n_groups": 2}, (3,)),
    "states beside attention": ("FalconH1Config", {**FALCON_H1, "mamba_n_heads": 6, "mamba_rms_norm": True}, (4,)),
    "heads of layers": ("Gemma4TextConfig", {**OWN, "num_key_value_heads": 2}, (3, 4)),
    "heads of layers, keys are values": ("Gemma4TextConfig", {**OWN, **VALUES}, (3, 4)),
    "heads of layers, experts": ("Gemma4TextConfig", {**OWN, **VALUES, **BESIDE}, (3,)),
}
RANKS = [(name, size) for name, (_, _, sizes) in MODELS.items() for size in sizes]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, sequences: type) -> dict[str, Case]:
    found = {}
    for seed, (name, (config_class, fields, _)) in enumerate(MODELS.items()):
        model_dir = tmp_path_factory.mktemp("checkpoint")
        found[name] = case_of(save(config_class, fields, seed, model_dir), seed, model_dir, sequences)
    return found


@pytest.fixture(scope="module")
def answers(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """Rank 0's answers by checkpoint and number of ranks, which start once for all checkpoints."""
    found = {}
    for size in sorted({size for _, size in RANKS}):
        chosen = [name for name, of in RANKS if of == size]
        jobs = [(cases[name].model_dir, OPTIONS, cases[name].plans) for name in chosen]
        every = answers_of_ranks(tmp_path_factory.mktemp("ranks"), size, jobs)[0]["jobs"]
        found |= {(name, size): answer for name, answer in zip(chosen, every, strict=True)}
    return found


@pytest.mark.parametrize(("name", "size"), RANKS)
def test_logits_equal_those_of_transformers(
    cases: dict[str, Case], answers: dict[tuple[str, int], Any], name: str, size: int
) -> None:
    answer = answers[name, size]
    assert "answers" in answer, answer
    differences = logit_differences(cases[name], answer["answers"])
    assert len(differences) > 10
    assert max(differences) < (3e-4 if name.startswith("states") else 1e-4)
