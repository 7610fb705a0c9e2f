"""The format that a model's own answers choose: 8 bits where they suffice, wider ones where they do not."""

import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ryzanstein.demo import MODEL_DIR
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model import choosing
from ryzanstein.worker.model.choosing import MOST_DIVERGENCE, load_chosen
from ryzanstein.worker.model.loading import LoadedModel, load_model, slice_bytes
from ryzanstein.worker.refusal import CheckpointError, ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions

OPTIONS = RunnerOptions(quantization="auto", num_blocks=64)
ALONE = TensorParallel(0, 1, LocalCollectives())
Threads = Callable[[int], AbstractContextManager[None]]


def chosen(model_dir: Path, **options: object) -> LoadedModel:
    return load_chosen(model_dir, ALONE, replace(OPTIONS, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a hundredfold channel before its products, of a width in which nothing is transformed."""
    model_dir = tmp_path_factory.mktemp("loud")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(1)
        shape: dict[str, Any] = {
            "hidden_size": 72,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "vocab_size": 300,
            "bos_token_id": 1,
        }
        config = transformers.LlamaConfig(**shape, num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=False)
        model: Any = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight"):
                    weight[5] = 300
        model.save_pretrained(model_dir)
    return model_dir


def changed(model_dir: Path, to: Path, name: str, number: float) -> Path:
    """A copy of a model with another first number in a tensor."""
    tensors = load_file(model_dir / "model.safetensors")
    tensors[name].view(-1)[0] = number
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((model_dir / "config.json").read_text())
    return to


def test_eight_bits_are_kept_where_they_change_little() -> None:
    loaded = chosen(MODEL_DIR)
    assert loaded.quantization == "int8"
    assert loaded.divergence is not None
    assert 0 < loaded.divergence < MOST_DIVERGENCE / 10


def test_the_same_is_measured_again_with_any_number_of_threads(threads: Threads) -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(chosen(MODEL_DIR).divergence)
    assert found[0] is not None
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-9)


def test_sixteen_bits_are_kept_where_eight_change_much(loud: Path) -> None:
    loaded = chosen(loud)
    assert loaded.quantization == "fp16"
    assert loaded.divergence is not None
    assert loaded.divergence > MOST_DIVERGENCE


def test_a_weight_beyond_sixteen_bits_leaves_full_precision(
    loud: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a weight outweighs what 8 bits change: only a stricter bound comes so far."""
    monkeypatch.setattr(choosing, "MOST_DIVERGENCE", -1.0)
    assert chosen(changed(loud, tmp_path, "model.layers.0.self_attn.o_proj.weight", 1e6)).quantization == "none"


def test_a_refusal_for_another_reason_leads_to_no_wider_format(loud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if memory were too short for 16 bits: it would be for 32."""

    def load(model: Path, tp: TensorParallel, options: RunnerOptions) -> LoadedModel:
        if options.quantization == "fp16":
            raise CheckpointError("4 bytes are free")
        return load_model(model, tp, options)

    monkeypatch.setattr(choosing, "load_model", load)
    with pytest.raises(CheckpointError, match="4 bytes are free"):
        chosen(loud)


def test_a_broken_model_is_left_in_full_precision_which_then_refuses_it(loud: Path, tmp_path: Path) -> None:
    loaded = chosen(changed(loud, tmp_path, "model.norm.weight", float("nan")))
    assert (loaded.quantization, loaded.divergence) == ("fp16", float("inf"))


@pytest.mark.parametrize(
    "options", [{"num_blocks": 1, "block_size": 4}, {"max_tokens_per_step": 3, "max_sequences": 1}, {"block_size": 1}], ids=str
)
def test_little_room_makes_the_texts_short(options: dict[str, int]) -> None:
    assert chosen(MODEL_DIR, **options).quantization == "int8"


def test_other_dtypes_stay_as_they_are() -> None:
    loaded = chosen(MODEL_DIR, dtype="bfloat16")
    assert (loaded.quantization, loaded.divergence) == ("none", None)


def test_without_kernels_the_choice_is_made_as_well() -> None:
    assert chosen(MODEL_DIR, kernels="torch").quantization == "int8"


def test_what_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        chosen(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tree"}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        chosen(tmp_path)


def test_the_bytes_of_a_format_that_is_not_chosen_yet_are_not_known() -> None:
    with pytest.raises(ModelRefused, match="quantization auto: the format is chosen while the model is loaded"):
        slice_bytes(MODEL_DIR, ALONE, OPTIONS)
