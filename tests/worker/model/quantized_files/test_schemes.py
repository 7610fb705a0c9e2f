"""The schemes of compressed-tensors: what they mean, and which of them a module has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.checkpoints.quantized_files.schemes.compressed_schemes import Scheme, schemes
from ryzanstein.worker.model.loading import open_model

COMPRESSED = "compressed-tensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def read(*weights: dict[str, Any]) -> list[Scheme]:
    groups = {str(number): {"weights": each} for number, each in enumerate(weights)}
    return schemes(Values({"format": "int-quantized", "config_groups": groups}))


@pytest.mark.parametrize(
    ("weights", "shape"),
    [({}, (1, 1)), ({"group_size": None}, (1, 1)), ({"group_size": -1}, (6, 1)), ({"group_size": 4}, (6, 2))],
)
def test_a_group_size_without_a_strategy_implies_one(weights: dict[str, Any], shape: tuple[int, int]) -> None:
    assert read(weights)[0].scales_shape((6, 8)) == shape


def test_schemes_that_are_the_same_are_one() -> None:
    assert len(read({"symmetric": True}, {"symmetric": False}, {})) == 2


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_choose_between_schemes_of_one_shape(
    symmetric: bool, first: bool, recipe: Callable[..., Any], published: Callable[..., Any], broken: Callable[..., Path]
) -> None:
    made = recipe(COMPRESSED, symmetric=symmetric, more={"format": "pack-quantized"})
    weights = {"num_bits": 4, "strategy": "group", "group_size": 64}
    groups = {str(each): {"weights": weights | {"symmetric": each}} for each in (first, not first)}
    _, files = open_model(broken(made, config_groups=groups))
    files.read(QUERY, (256, 256), found := torch.zeros(256, 256))
    files.close()
    assert torch.equal(found, load_file(published(made).floats / "model.safetensors")[QUERY])
