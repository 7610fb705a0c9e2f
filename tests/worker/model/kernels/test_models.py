"""Whole models with kernels of our own and with torch's operators: the same logits, and those of transformers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.rank_processes import answers_of_ranks
from torch import Tensor

from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import PRESETS
from ryzanstein.worker.engine.plan import StepPlan

pytestmark = pytest.mark.long

OPTIONS = {"num_blocks": 80, "block_size": 4, "num_threads": 1, "max_tokens_per_step": 128, "max_sequences": 4}
PROMPTS = (70, 5, 33)
NUM_DECODES = 12
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 251,
    "max_position_embeddings": 256,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 251, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2}
GEMMA2 = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SHAPE, "attention_bias": True}),
    "gemma2": ("Gemma2Config", {**SHAPE, **GEMMA2}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "mixtral": ("MixtralConfig", {**SHAPE, "sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Config", {**SHAPE, **LATENT}),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, and for each of the plans that ask for them the logits [R, V] of transformers."""

    model_dir: Path
    plans: list[StepPlan]
    expected: list[Tensor]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, sequences: type) -> dict[str, Case]:
    return {name: _case(name, tmp_path_factory.mktemp("checkpoint"), sequences) for name in CONFIGS}


@torch.inference_mode()
def _case(name: str, model_dir: Path, sequences: type) -> Case:
    model = _write(name, model_dir)
    ids = random_ids(251)
    logits = [model(torch.tensor([row])).logits[0].float() for row in ids]
    plans = plans_for(ids, sequences)
    expected = [torch.stack([logits[s][length - 1] for s, length in enumerate(_lengths(plan))]) for plan in plans]
    return Case(model_dir, plans, expected)


def _write(name: str, model_dir: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        config_class, fields = CONFIGS[name]
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(model_dir)
    return model


def random_ids(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab_size, (length + NUM_DECODES,), generator=generator).tolist() for length in PROMPTS]


def plans_for(ids: list[list[int]], sequences: type) -> list[StepPlan]:
    """Prompts whole, then single tokens of all together, over blocks that never lie side by side."""
    tables = [[s + 3 * block for block in range(25)] for s in range(len(ids))]
    books = sequences(None, tables)
    books.start([row[:length] for row, length in zip(ids, PROMPTS, strict=True)])
    plans = [books.plan(dict(enumerate(PROMPTS)), full_logits=True)]
    for index in range(NUM_DECODES):
        for s, length in enumerate(PROMPTS):
            books.ids[s].append(ids[s][length + index])
        plans.append(books.plan({0: 1, 1: 1, 2: 1}, full_logits=True))
    return plans


def _lengths(plan: StepPlan) -> list[int]:
    return [context + new for context, new in zip(plan.num_context, plan.num_new, strict=True)]


def logits_of(runner: Any, plans: list[StepPlan]) -> list[Tensor]:
    return [runner.hidden_logits(plan) for plan in plans]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_torch_and_of_transformers(cases: dict[str, Case], runner: Callable[..., Any], name: str) -> None:
    case = cases[name]
    native = runner(case.model_dir, **OPTIONS, kernels="native")
    torchs = runner(case.model_dir, **OPTIONS, kernels="torch")
    assert (native.without_kernels, torchs.without_kernels) == ("", "chosen")
    for ours, theirs, expected in zip(logits_of(native, case.plans), logits_of(torchs, case.plans), case.expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.distributed
def test_two_ranks_agree_with_one(cases: dict[str, Case], runner: Callable[..., Any], tmp_path: Path) -> None:
    case = cases["llama"]
    jobs = [(case.model_dir, {**OPTIONS, "kernels": kernels}, case.plans) for kernels in ("native", "torch")]
    native, torchs = answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"]
    alone = logits_of(runner(case.model_dir, **OPTIONS, kernels="native"), case.plans)
    for ours, theirs, one in zip(native["answers"], torchs["answers"], alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_float16_cache_changes_logits_by_a_thousandth_at_most(
    tmp_path: Path, runner: Callable[..., Any], sequences: type, kernels: str
) -> None:
    synthesize(tmp_path, Recipe("llama", PRESETS["S"], "float32", seed=0, num_files=1))
    plans = plans_for(random_ids(PRESETS["S"].vocab_size), sequences)
    full, half = (
        logits_of(runner(tmp_path, **OPTIONS, kernels=kernels, kv_dtype=kv_dtype), plans) for kv_dtype in ("auto", "float16")
    )
    assert max((ours - exact).abs().max() for ours, exact in zip(half, full, strict=True)) < 1e-3
    assert not torch.equal(half[-1], full[-1])
