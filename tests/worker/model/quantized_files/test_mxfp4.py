"""gpt-oss in MXFP4, written here as it is published: against transformers, which unpacks it, and in blocks."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.model.rank_processes import answers_of_ranks
from torch import Tensor

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.loading import open_model
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.refusal import ModelRefused

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 251,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "sliding_window": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.0,
    "pad_token_id": 0,
}
LENGTH = 41
IDS = torch.randint(3, 251, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
OPTIONS = {"num_blocks": 80, "block_size": 4, "num_threads": 1, "max_tokens_per_step": 64, "max_sequences": 4}
Change = Callable[[Tensor], Tensor] | None
GATE_UPS, DOWNS = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"

REFUSED: list[tuple[str, Change, str]] = [
    (f"{GATE_UPS}_blocks", lambda x: x[:, :-1], "needs experts, outputs, blocks and 16 bytes"),
    (f"{GATE_UPS}_blocks", lambda x: x[..., :15], "needs experts, outputs, blocks and 16 bytes"),
    (f"{DOWNS}_blocks", lambda x: x.float(), "has dtype F32, needs U8"),
    (f"{DOWNS}_scales", lambda x: x[:, :-1], "has shape [5, 63, 3], needs [5, 64, 3]"),
    (f"{DOWNS}_scales", None, "is missing"),
    (f"{DOWNS}_bias", lambda x: x[:, :-1], "has shape [63], config.json needs [64]"),
    (f"{GATE_UPS}_bias", None, "is missing"),
]
"""A tensor, what becomes of it, and what is said of that."""


def packed(weight_XIO: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [X, O, I / 32, 16] and exponents [X, O, I / 32], as the format's definition has them."""
    groups = weight_XIO.transpose(1, 2).numpy().reshape(weight_XIO.shape[0], weight_XIO.shape[2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    codes = np.abs(groups[..., None] / np.exp2(exponents)[..., None, None] - NUMBERS).argmin(-1).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.from_numpy(blocks).contiguous(), torch.from_numpy((exponents + 127).astype(np.uint8)).contiguous()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A directory, and transformers' logits [T, V] of it."""
    model_dir = tmp_path_factory.mktemp("gpt_oss")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**SHAPE)).float()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
        model.save_pretrained(model_dir)
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(model_dir / "model.safetensors").items():
            if name.endswith(("gate_up_proj", "down_proj")):
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(tensor)
            else:
                tensors[name] = tensor
        save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((model_dir / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
        (model_dir / "config.json").write_text(json.dumps(config))
        judge = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir,
            quantization_config=transformers.Mxfp4Config(dequantize=True),
            dtype=torch.float32,
            attn_implementation="eager",
        )
        with torch.inference_mode():
            return model_dir, judge(torch.tensor([IDS])).logits[0]


def plan(count: int, num_context: int = 0) -> StepPlan:
    """A step as if all layers were one group."""
    ids = IDS[num_context : num_context + count]
    return StepPlan(1, ids, [count], [num_context], [list(range(-(-LENGTH // 4)))], [0], full_logits=True)


STEPS = (plan(30), plan(10, 30), plan(1, 40))


def logits(runner: ModelRunner) -> Tensor:
    plans = (runner.plans.plan(*msgspec.structs.astuple(step)[1:6], full_logits=True) for step in STEPS)
    found = [runner.hidden_logits(step) for step in plans]
    return torch.cat([each for each in found if each is not None])


def off(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_floats_give_what_transformers_computes(published: tuple[Path, Tensor], runner: Callable[..., ModelRunner]) -> None:
    model_dir, expected_TV = published
    found = logits(runner(model_dir, kernels="torch", **OPTIONS))
    assert off(found, expected_TV[[29, 39, 40]]) < 1e-5


def test_blocks_round_rows_alone(published: tuple[Path, Tensor], runner: Callable[..., ModelRunner]) -> None:
    model_dir, expected_TV = published
    assert 0 < off(logits(runner(model_dir, **OPTIONS)), expected_TV[[29, 39, 40]]) < 0.03


def test_experts_stay_in_blocks_with_their_numbers(published: tuple[Path, Tensor]) -> None:
    _, files = open_model(published[0])
    for name, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
        blocks = files.blocks(f"model.layers.1.mlp.experts.4.{name}.weight")
        assert blocks is not None
        assert blocks.kind.name == "MXFP4"
        assert blocks.shape == shape
    files.close()


@pytest.mark.distributed
def test_two_ranks_give_what_one_gives(
    published: tuple[Path, Tensor], runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    """Experts are whole on a rank; heads, which have sinks, are divided."""
    model_dir = published[0]
    (found,) = answers_of_ranks(tmp_path, 2, [(model_dir, OPTIONS, list(STEPS))])[0]["jobs"]
    assert off(torch.cat(found["answers"]), logits(runner(model_dir, **OPTIONS))) < 1e-2


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: f"{refused[0].rpartition('.')[2]}: {refused[2][:20]}")
def test_tensors_that_do_not_fit_are_named(
    refused: tuple[str, Change, str], published: tuple[Path, Tensor], runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    name, change, said = refused
    tensors = load_file(published[0] / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((published[0] / "config.json").read_bytes())
    with pytest.raises(ModelRefused) as refusal:
        runner(tmp_path, **OPTIONS)
    assert said in str(refusal.value)


def test_more_experts_than_any_model_has_are_refused(
    published: tuple[Path, Tensor], runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    tensors = load_file(published[0] / "model.safetensors")
    tensors[f"{DOWNS}_blocks"] = torch.zeros(2**17 + 1, 1, 1, 16, dtype=torch.uint8)
    tensors[f"{DOWNS}_scales"] = torch.zeros(2**17 + 1, 1, 1, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((published[0] / "config.json").read_bytes())
    with pytest.raises(ModelRefused, match="is one of more than 131072 matrices of experts"):
        runner(tmp_path, **OPTIONS)
