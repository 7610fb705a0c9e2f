"""Ternary matrices (BitNet b1.58)."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ryzanstein.tools.quantize.methods.ternary import is_ternary, ternary

from .conftest import run


def test_a_ternary_matrix_is_kept_exactly() -> None:
    weight_OI = torch.randint(-1, 2, (12, 40)).float() * 0.037
    assert is_ternary(weight_OI)
    torch.testing.assert_close(ternary(weight_OI).floats(), weight_OI)


def test_others_are_rounded_by_their_mean_magnitude() -> None:
    weight_OI = torch.randn(16, 64)
    mean = weight_OI.abs().mean()
    assert not is_ternary(weight_OI)
    torch.testing.assert_close(ternary(weight_OI).floats(), (weight_OI / mean).round().clamp(-1, 1) * mean)


def test_zeros() -> None:
    assert torch.equal(ternary(torch.zeros(4, 8)).floats(), torch.zeros(4, 8))


def test_without_a_text_every_layer_must_be_ternary(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    matrices = [name for name, tensor in tensors.items() if ".layers." in name and tensor.dim() == 2]
    for name in matrices:
        if ".layers.0." in name:
            tensors[name] = tensors[name].sign() * 0.05
    save_file(tensors, source / "model.safetensors")
    refused = run(source, tmp_path / "quantized", "--method", "ternary")
    assert refused.returncode == 1
    assert refused.stderr.startswith("tensor model.layers.1.")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    for name in matrices:
        tensors[name] = tensors[name].sign() * 0.05
    save_file(tensors, source / "model.safetensors")
    assert run(source, tmp_path / "quantized", "--method", "ternary").returncode == 0
