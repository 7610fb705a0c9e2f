"""AWQ's scales: the folded layer computes the same function, and rounding it costs less where some activations are large."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ryzanstein.tools.quantize.methods.awq import fold_scales
from ryzanstein.tools.quantize.methods.grids import Grid, fitted
from ryzanstein.tools.quantize.reading.layer_tensors import LayerTensors
from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights
from ryzanstein.tools.quantize.reading.origin import Origin
from ryzanstein.tools.quantize.reading.walk import Walk

GRID = Grid(4, 32)
# Norms without, with one plus, with shifts; one norm for both halves, or for attention and Mamba 2; norms after them; fused
# projections; gates; plain MLPs.
FOLDED = {
    "llama": {},
    "qwen2": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32},
    "starcoder2": {},
    "cohere": {},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 128, "rotary_dim": 8},
    "phi3": {},
    "qwen3_5_text": {"head_dim": 16, "layer_types": ["full_attention"] * 2},
    "mixtral": {"num_local_experts": 4},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16},
}


@pytest.fixture
def opened(tiny: Callable[..., Path]) -> Iterator[Callable[..., Origin]]:
    """Writes a tiny model and opens it."""
    with ExitStack() as stack:
        yield lambda *kind, **changes: stack.enter_context(Origin.open(tiny(*kind, **changes)))


@pytest.mark.parametrize("model_type", FOLDED)
@torch.inference_mode()
def test_folding_keeps_the_function_and_lowers_the_error(model_type: str, opened: Callable[..., Origin]) -> None:
    origin = opened(model_type, **FOLDED[model_type])
    walk, weights = Walk(origin.spec, 64), LayerWeights(origin.files)
    layer = walk.layer(weights, 0)
    torch.manual_seed(3)
    x_TE = torch.randn(64, 64)
    x_TE[:, 5] *= 30  # an input with large activations, which AWQ is for
    expected_TE = layer(x_TE)
    weights.watch()
    layer(x_TE)
    weights.watch_no_more()

    tensors = LayerTensors(weights, origin.dtypes)
    before = rounded(tensors, weights, layer, x_TE, expected_TE)
    fold_scales(tensors, weights.sites, origin.spec, 0, lambda num_inputs: GRID)
    assert tensors.replaced
    for name, tensor in tensors.replaced.items():
        weights.put(name, tensor)
    torch.testing.assert_close(layer(x_TE), expected_TE, atol=2e-4, rtol=2e-4)
    assert rounded(tensors, weights, layer, x_TE, expected_TE) < before


def rounded(tensors: LayerTensors, weights: LayerWeights, layer: Any, x_TE: torch.Tensor, expected_TE: torch.Tensor) -> float:
    """Returns the error of the layer with all matrices rounded to nearest, and restores them."""
    names = [name for site in weights.sites for name in site.matrices]
    for name in names:
        weights.put(name, fitted(tensors[name], GRID, searched=False).floats())
    error = (layer(x_TE) - expected_TE).square().mean().item()
    for name in names:
        weights.put(name, tensors[name])
    return error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_norm_rounded_to_16_bits_costs_nothing(dtype: torch.dtype, opened: Callable[..., Origin]) -> None:
    """(1 + w) / s - 1 in bfloat16 would be off by 20 % where s is large: the scales make up for the rounding."""
    origin = opened("gemma3_text", dtype, head_dim=16, sliding_window=32)
    walk, weights = Walk(origin.spec, 64), LayerWeights(origin.files)
    layer = walk.layer(weights, 0)
    torch.manual_seed(3)
    x_TE = torch.randn(64, 64) * torch.logspace(-2, 2, 64)
    expected_TE = layer(x_TE)
    weights.watch()
    layer(x_TE)
    weights.watch_no_more()
    tensors = LayerTensors(weights, origin.dtypes)
    fold_scales(tensors, weights.sites, origin.spec, 0, lambda num_inputs: GRID)
    folded = {name for name in tensors.replaced if "norm" in name}
    assert folded
    for name, tensor in tensors.replaced.items():
        weights.put(name, tensors.written(name).float() if name in folded else tensor)
    torch.testing.assert_close(layer(x_TE), expected_TE, atol=1e-3, rtol=1e-3)
