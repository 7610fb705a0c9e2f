"""Every architecture that is served is trained, or refused by name: its logits, its loss and all its gradients."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.worker.model.architectures.checkpoints import CASES, write

from ryzanstein.tools.finetune.base.adapter import targets_of, with_adapter
from ryzanstein.tools.finetune.base.model import NOT_TRAINED, build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.data.batches import planned
from ryzanstein.tools.finetune.data.examples import Example
from ryzanstein.tools.finetune.request import LoraShape
from ryzanstein.tools.finetune.training.loss import summed_loss
from ryzanstein.tools.finetune.training.packing import refuse_unpackable
from ryzanstein.tools.finetune.training.trainer import TrainingMaterial
from ryzanstein.worker.architectures.registry import ARCHITECTURES
from ryzanstein.worker.refusal import ModelRefused

SEEDS = {name: seed for seed, name in enumerate(CASES)}
ALWAYS = ("llama", "gpt2", "gemma2", "deepseek_v3", "granitemoe", "nemotron_h states")
"""One of each kind: biases, transposed weights, capped logits, latents, experts in one tensor, states."""
UNPACKABLE = {
    *("opt", "bloom", "falcon", "mpt"),
    *(
        "granitemoehybrid",
        "bamba",
        "falcon_h1",
        "nemotron_h",
        "lfm2",
        "lfm2_moe",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    ),
}
"""What is seen besides positions: biases of distance, positions of their own, states."""


def marked() -> list[Any]:
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in CASES]


def example(ids: torch.Tensor) -> Example:
    return Example(array("i", ids.tolist()), ((5, len(ids)),), 1)


@pytest.mark.parametrize("name", marked())
def test_an_architecture_is_trained_or_refused_by_name(name: str, tmp_path: Path) -> None:
    judge = write(name, SEEDS[name], tmp_path)
    model_type = json.loads((tmp_path / "config.json").read_text())["model_type"]
    ids_NT = torch.randint(3, 250, (2, 40))
    with Base.open(tmp_path) as base:
        if model_type in NOT_TRAINED:
            with pytest.raises(ModelRefused, match=f"model_type {model_type} is not trained: {NOT_TRAINED[model_type]}"):
                build(base)
            return
        model = build(base)
        with torch.no_grad():
            expected, found = judge(ids_NT).logits, model(ids_NT).logits
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        adapted = with_adapter(model, targets_of(model, base.spec, ("all",)), LoraShape(4, 8.0), seed=0)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.05)
    causal = adapted.get_base_model()
    causal.train()
    labels_NT = ids_NT.roll(-1, 1)
    labels_NT[:, :20] = -100
    loss = summed_loss(causal, {"input_ids": ids_NT, "shift_labels": labels_NT})
    logits_NTV = causal(ids_NT, use_cache=False).logits
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits_NTV.flatten(0, 1), labels_NT.flatten(), reduction="sum").item(), rel=1e-5
    )
    torch.autograd.backward(loss)
    trained = {parameter_name: each for parameter_name, each in adapted.named_parameters() if each.requires_grad}
    assert trained
    assert [each for each, parameter in trained.items() if parameter.grad is None or not parameter.grad.any()] == []
    examples = [example(ids_NT[0, :17]), example(ids_NT[1, :23])]
    material = TrainingMaterial(examples, [], planned(examples, 1, 1, 0, pack_to=64))
    if model_type in UNPACKABLE:
        with pytest.raises(ModelRefused, match="--packing: "):
            refuse_unpackable(adapted, base.spec, material)
    else:
        refuse_unpackable(adapted, base.spec, material)


def test_every_architecture_is_among_them() -> None:
    """The others have no checkpoint that transformers could write."""
    assert set(NOT_TRAINED) <= set(ARCHITECTURES)
    named = {name.split()[0].split(",")[0] for name in CASES}
    assert set(ARCHITECTURES) - named <= {"internlm2"}
