"""Layers over served weights multiply, and give gradients, as plain layers over the floats of the same blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.finetuning.conftest import DEMO, dequantized

from ryzanstein.tools.finetune.base import linear
from ryzanstein.tools.finetune.base.adapter import targets_of, with_adapter
from ryzanstein.tools.finetune.base.linear import BlocksEmbedding, BlocksLinear, BlocksWeight
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.request import LoraShape
from ryzanstein.tools.finetune.training.loss import summed_loss
from ryzanstein.worker.products.int8 import Int8Product, NativeKernel

STEPS = 50


def losses(model: Any, base: Base) -> list[float]:
    """The losses of steps on one batch, with AdamW."""
    adapted = with_adapter(model, targets_of(model, base.spec, ("all",)), LoraShape(rank=4, alpha=8.0), seed=1)
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=3e-3)
    torch.manual_seed(2)
    ids_NT = torch.randint(3, 400, (2, 24))
    inputs = {"input_ids": ids_NT, "shift_labels": ids_NT.roll(-1, 1)}
    found = []
    for _ in range(STEPS):
        loss = summed_loss(adapted.get_base_model(), inputs) / ids_NT.numel()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("kind", ["quantized", "gguf"])
def test_the_loss_curve_is_that_of_plain_peft_on_the_floats_of_the_same_blocks(
    kind: str, request: pytest.FixtureRequest
) -> None:
    with Base.open(request.getfixturevalue(kind)) as base:
        ours, plain = build(base), dequantized(base)
        assert any(isinstance(module, BlocksLinear) for module in ours.modules())
        assert not any(isinstance(module, BlocksLinear) for module in plain.modules())
        found, expected = losses(ours, base), losses(plain, base)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[-1] < 0.8 * found[0]


def test_an_embedding_in_blocks_is_looked_up_and_so_is_its_tied_head(gguf: Path) -> None:
    with Base.open(gguf) as base:
        model, floats = build(base), dequantized(base)
    embedding, plain = model.get_input_embeddings(), floats.get_input_embeddings()
    assert isinstance(embedding, BlocksEmbedding)
    ids_NT = torch.tensor([[5, 9, 5], [0, 511, 9]])
    assert torch.equal(embedding(ids_NT), plain(ids_NT))
    assert torch.equal(model(ids_NT).logits.argmax(-1), floats(ids_NT).logits.argmax(-1))


def test_windows_of_rows_give_what_the_whole_weight_gives(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Base.open(gguf) as base:
        served = base.served("model.layers.0.mlp.up_proj.weight")
    assert served is not None
    x_NTI = torch.randn(2, 3, served.shape[1], requires_grad=True)
    bias_O = torch.nn.Parameter(torch.randn(served.shape[0]), requires_grad=False)
    whole = BlocksLinear(served, bias_O)(x_NTI)
    (gradient,) = torch.autograd.grad(whole.square().sum(), x_NTI)
    monkeypatch.setattr(linear, "_WINDOW_BYTES", 4 * served.shape[1] * 100)
    parts = BlocksLinear(BlocksWeight(served, served.shape), bias_O)
    in_parts = parts(x_NTI)
    (other,) = torch.autograd.grad(in_parts.square().sum(), x_NTI)
    torch.testing.assert_close(in_parts, whole)
    torch.testing.assert_close(other, gradient)


def test_a_base_that_is_served_in_8_bits_is_trained_on_what_a_node_multiplies() -> None:
    """Products of the served weight differ by the rounding of their rows, which are whole numbers of 127 here."""
    with Base.open(DEMO) as base:
        model, floats = build(base, int8=True), build(base)
        assert base.native is not None
        weight_OI = base.floats("model.layers.0.mlp.up_proj.weight")
        served = Int8Product.of(weight_OI, None, NativeKernel, base.native)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, BlocksLinear)
    x_TI = torch.randn(40, weight_OI.shape[1])
    assert (layer(x_TI) - served(x_TI)).abs().max() < 0.02 * layer(x_TI).abs().max()
    assert not torch.equal(layer.served.floats(), weight_OI)
    assert (layer.served.floats() - weight_OI).abs().max() < 0.02 * weight_OI.abs().max()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, BlocksEmbedding)
    assert isinstance(head, BlocksLinear)
    assert embedding.served is head.served
    ids_NT = torch.randint(2, 1000, (2, 20))
    assert (model(ids_NT).logits - floats(ids_NT).logits).abs().max() < 0.1 * floats(ids_NT).logits.abs().max()


def test_a_base_of_floats_is_that_of_transformers_to_the_bit() -> None:
    from transformers import AutoModelForCausalLM

    ids_NT = torch.randint(2, 1000, (2, 20))
    with Base.open(DEMO) as base:
        ours = build(base)
    assert torch.equal(ours(ids_NT).logits, AutoModelForCausalLM.from_pretrained(DEMO)(ids_NT).logits)
