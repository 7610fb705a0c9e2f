"""What DeepSeek's checkpoints are besides: dense at first, then with layers that predict further tokens and cached latents."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ryzanstein.worker.architectures.registry import read_spec, spec_of
from ryzanstein.worker.architectures.spec import LinearScaling, RotarySpec
from ryzanstein.worker.cache.sizes import slot_width
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.refusal import CheckpointError

RANK, ROTATED, NUM_LAYERS, NUM_FURTHER = 20, 6, 3, 2


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.disable_progress_bar()
        config = transformers.DeepseekV3Config(
            hidden_size=48,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=6,
            num_key_value_heads=6,
            intermediate_size=64,
            vocab_size=251,
            max_position_embeddings=256,
            kv_lora_rank=RANK,
            q_lora_rank=None,
            qk_nope_head_dim=10,
            qk_rope_head_dim=ROTATED,
            v_head_dim=7,
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            num_nextn_predict_layers=NUM_FURTHER,
        )
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    return tmp_path


def add_tensor(model_dir: Path, name: str) -> None:
    path = model_dir / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(3)}, path)


def test_layers_that_predict_further_tokens_are_not_read(model_dir: Path, runner: Callable[..., Any]) -> None:
    add_tensor(model_dir, f"model.layers.{NUM_LAYERS + NUM_FURTHER - 1}.eh_proj.weight")
    assert runner(model_dir).vocab_size == 251


def test_layers_that_nothing_announces_are_refused(model_dir: Path, runner: Callable[..., Any]) -> None:
    name = f"model.layers.{NUM_LAYERS + NUM_FURTHER}.eh_proj.weight"
    add_tensor(model_dir, name)
    with pytest.raises(CheckpointError, match=name):
        runner(model_dir)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_slot_of_the_cache_has_the_latent_once_for_all_heads(model_dir: Path, size: int) -> None:
    tp = TensorParallel(0, size, LocalCollectives())
    assert slot_width(read_spec(model_dir), tp) == RANK + ROTATED


def test_the_dense_first_generation_is_stored_as_a_llama() -> None:
    llm = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 30,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 102400,
    }
    coder = {**llm, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000}
    assert spec_of(llm).rotaries == (RotarySpec(10000.0, 128),)
    assert spec_of(coder).rotaries == (RotarySpec(100000.0, 128, scaling=LinearScaling(4.0)),)
