"""Broken checkpoints: each is refused before anything is allocated, and the message names the file and the tensor."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ryzanstein.worker.refusal import CheckpointError, ModelRefused

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model_dir(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture
def refusal(runner: Callable[..., Any]) -> Callable[..., str]:
    """The message with which a directory is refused."""

    def refuse(model_dir: Path, **options: Any) -> str:
        with pytest.raises(ModelRefused) as caught:
            runner(model_dir, **options)
        return str(caught.value)

    return refuse


def _rewrite(model_dir: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def test_a_missing_tensor_is_named(model_dir: Path, refusal: Callable[..., str]) -> None:
    _rewrite(model_dir, lambda tensors: tensors.pop(QUERY))
    assert refusal(model_dir) == f"{model_dir}: tensor {QUERY} is missing"


def test_a_wrong_shape_is_named_with_both_shapes(model_dir: Path, refusal: Callable[..., str]) -> None:
    _rewrite(model_dir, lambda tensors: tensors.update({QUERY: torch.zeros(64, 60)}))
    message = refusal(model_dir)
    assert message.startswith(f"{model_dir}/model.safetensors: tensor {QUERY}")
    assert "[64, 60]" in message
    assert "[64, 64]" in message


def test_a_dtype_that_is_no_float_is_named(model_dir: Path, refusal: Callable[..., str]) -> None:
    _rewrite(model_dir, lambda tensors: tensors.update({QUERY: torch.zeros(64, 64, dtype=torch.int8)}))
    assert refusal(model_dir) == f"{model_dir}/model.safetensors: tensor {QUERY} has dtype I8, which is not supported"


def test_a_tensor_that_no_layer_reads_is_named(model_dir: Path, refusal: Callable[..., str]) -> None:
    _rewrite(model_dir, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(8)}))
    assert "tensor model.layers.0.self_attn.q_norm.weight is not used by this architecture" in refusal(model_dir)


def test_a_truncated_file_is_named_with_the_tensor_that_breaks_off(model_dir: Path, refusal: Callable[..., str]) -> None:
    path = model_dir / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    message = refusal(model_dir)
    assert message.startswith(f"{path}: truncated in tensor ")
    assert message.split("tensor ")[1].split(":")[0] in load_names(whole)


def load_names(whole: bytes) -> list[str]:
    (length,) = struct.unpack("<Q", whole[:8])
    return list(json.loads(whole[8 : 8 + length]))


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_file_cut_in_its_header_is_named(model_dir: Path, refusal: Callable[..., str], size: int) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert str(path) in refusal(model_dir)


def test_a_file_of_something_else_is_named(model_dir: Path, refusal: Callable[..., str]) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(b"\x10" + b"\0" * 7 + b"this is not json" + b"\0" * 100)
    assert refusal(model_dir).startswith(f"{path}: not a safetensors file")


def test_a_header_longer_than_any_is_refused_unread(model_dir: Path, refusal: Callable[..., str]) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}" * 50)
    assert str(path) in refusal(model_dir)


def test_a_header_whose_numbers_contradict_is_refused(model_dir: Path, refusal: Callable[..., str]) -> None:
    path = model_dir / "model.safetensors"
    header = json.dumps({QUERY: {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    assert refusal(model_dir).startswith(f"{path}: tensor {QUERY} has 8 bytes")


def test_a_missing_file_is_named(model_dir: Path, refusal: Callable[..., str]) -> None:
    (model_dir / "model.safetensors").unlink()
    assert refusal(model_dir) == f"{model_dir}/model.safetensors: No such file or directory"


def test_a_pointer_of_git_lfs_is_named(model_dir: Path, refusal: Callable[..., str]) -> None:
    path = model_dir / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert refusal(model_dir).startswith(f"{path}: a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`")


def test_parts_without_their_index_are_named(checkpoint: Callable[..., Path], refusal: Callable[..., str]) -> None:
    model_dir = checkpoint(max_shard_size="50KB")
    index = model_dir / "model.safetensors.index.json"
    index.unlink()
    assert refusal(model_dir) == f"{index}: No such file or directory, but its parts are there: download it too"


@pytest.mark.parametrize("name", ["consolidated.safetensors", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_weights_of_another_format_are_named(model_dir: Path, refusal: Callable[..., str], name: str) -> None:
    (model_dir / "model.safetensors").rename(model_dir / name)
    assert f"{name} exists, but its format is not supported: save the model as safetensors" in refusal(model_dir)


def test_other_weights_beside_those_of_the_index_are_not_read(checkpoint: Callable[..., Path], runner: Any) -> None:
    """Mistral's repositories have everything twice."""
    model_dir = checkpoint(max_shard_size="50KB")
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, model_dir / "consolidated.safetensors")
    (model_dir / "original").mkdir()
    (model_dir / "original/consolidated.00.pth").write_bytes(b"x")
    assert runner(model_dir)


def test_a_file_that_the_index_names_and_is_not_there(checkpoint: Callable[..., Path], refusal: Callable[..., str]) -> None:
    model_dir = checkpoint(max_shard_size="50KB")
    first = sorted(model_dir.glob("model-*.safetensors"))[0]
    first.unlink()
    assert refusal(model_dir) == f"{first}: No such file or directory"


def test_a_tensor_that_the_index_places_wrongly(checkpoint: Callable[..., Path], refusal: Callable[..., str]) -> None:
    model_dir = checkpoint(max_shard_size="50KB")
    index = json.loads((model_dir / "model.safetensors.index.json").read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][QUERY])
    index["weight_map"][QUERY] = other
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(model_dir)
    assert message.startswith(f"{model_dir / other}: tensor {QUERY} is missing")


def test_an_index_cannot_lead_out_of_the_directory(model_dir: Path, refusal: Callable[..., str]) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: "../other/model.safetensors"}}))
    assert "files in the same directory" in refusal(model_dir)


def test_too_little_memory_is_reported_in_numbers(model_dir: Path, refusal: Callable[..., str]) -> None:
    message = refusal(model_dir, num_blocks=10**12)
    assert str(10**12 * 4 * 2 * 2 * 4 * 8 * 4) in message
    assert "bytes are free on cpu" in message
    assert " for steps in C, " in message


def test_a_budget_below_one_block_is_reported_in_numbers(model_dir: Path, refusal: Callable[..., str]) -> None:
    message = refusal(model_dir, num_blocks=None, kv_bytes=2047)
    assert message == "a KV cache of 2047 bytes per rank is smaller than one block of 2048 bytes"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope_parameters.rope_type 'mrope' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "ntk"}}, "rope_scaling.rope_type 'ntk' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config is not supported (quant_method 'aqlm')"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number above 0, got -1"),
        ({"num_key_value_heads": 3}, "8 attention heads do not divide over 3 key-value heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
        ({"rope_parameters": 3}, "rope_parameters must be an object"),
    ],
)
def test_a_description_that_is_not_known_is_refused_by_name(
    model_dir: Path, refusal: Callable[..., str], edit_config: Callable[..., None], changes: dict[str, Any], named: str
) -> None:
    edit_config(model_dir, **changes)
    message = refusal(model_dir)
    assert message.startswith("config.json: ")
    assert named in message


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_that_is_no_object_is_named(model_dir: Path, refusal: Callable[..., str], text: str) -> None:
    (model_dir / "config.json").write_text(text)
    assert refusal(model_dir).startswith(f"{model_dir}/config.json: ")


def test_weights_of_another_size_than_the_config_says(
    model_dir: Path, refusal: Callable[..., str], edit_config: Callable[..., None]
) -> None:
    edit_config(model_dir, intermediate_size=128)
    assert "mlp.gate_proj.weight has shape [96, 64], config.json needs [128, 64]" in refusal(model_dir)


def test_refusals_are_checkpoint_errors(model_dir: Path, runner: Callable[..., Any]) -> None:
    _rewrite(model_dir, lambda tensors: tensors.pop(QUERY))
    with pytest.raises(CheckpointError, match="is missing"):
        runner(model_dir)
