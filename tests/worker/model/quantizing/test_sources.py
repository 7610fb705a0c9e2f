"""Models that come as GGUF files, and those that cannot be written."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file

from .conftest import config_of, run
from .test_models import off, opened

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96}

MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
}


def as_file(source: Path, target: Path, kind: str) -> Path:
    to_file(source, target, WRITTEN[kind], io.StringIO())
    return target


def tensors_of(model_dir: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in model_dir.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_file_of_floats_becomes_what_its_directory_becomes(
    llama: Path, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    file = as_file(llama, tmp_path / "model.gguf", "f32")
    from_file, from_directory = quantized(file, "from-file", method="rtn"), quantized(llama, "from-directory", method="rtn")
    found, expected = tensors_of(from_file), tensors_of(from_directory)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, torch.equal(found[name], tensor)) == (tensor.dtype, True), name
    assert config_of(from_file)["quantization_config"] == config_of(from_directory)["quantization_config"]
    assert off(opened(from_file), opened(from_directory)) == 0


@pytest.mark.parametrize("model_type", MODELS)
def test_a_file_of_blocks_is_calibrated_with_its_own_tokenizer(
    model_type: str, tiny: Callable[..., Path], text: Path, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny(model_type, **MODELS[model_type])
    file = as_file(source, tmp_path / "model.gguf", "q8_0")
    target = quantized(file, method="gptq", bits=8, calibration=(text,), num_tokens=3000)
    assert 0 < off(opened(target), opened(source)) < 0.05


@pytest.mark.parametrize("kind", ["directory", "file"])
@pytest.mark.parametrize("method", ["rtn", "int8"])
def test_matrices_that_are_stored_transposed_are_refused(
    kind: str, method: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """GPT-2's. Neither transformers nor our own engine reads them quantized."""
    source = tiny("gpt2", **GPT2)
    if kind == "file":
        source = as_file(source, tmp_path / "model.gguf", "f32")
    refused = run(source, tmp_path / "quantized", "--method", method)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"{source}: model_type 'gpt2' stores its matrices as [inputs, outputs]")
    assert [path.name for path in tmp_path.iterdir()] == (["model.gguf"] if kind == "file" else [])
