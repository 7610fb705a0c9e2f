"""A merged model has the logits of its base with the adapter, and is read by a node and by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.architectures.checkpoints import CASES, write

from ryzanstein.tools.finetune.base.adapter import targets_of, with_adapter
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.merging import merge, with_trained
from ryzanstein.tools.finetune.request import LoraShape
from ryzanstein.tools.finetune.written.adapter import write_adapter
from ryzanstein.tools.synthesize.tokenizer import write_tokenizer
from ryzanstein.worker.refusal import ModelRefused


def random_adapter(path: Path, folder: Path) -> Path:
    """An adapter for a base that changes what it says."""
    with Base.open(path) as base:
        model = build(base)
        adapted = with_adapter(model, targets_of(model, base.spec, ("all",)), LoraShape(4, 8.0), seed=0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    folder.mkdir()
    write_adapter(adapted, folder)
    return folder


def logits(model: Any, ids_NT: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(ids_NT).logits
    return found


def assert_merged(path: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    adapter = random_adapter(path, tmp_path / "adapter")
    ids_NT = torch.randint(3, 250, (2, 20))
    with Base.open(path) as base:
        without = logits(build(base, floats=True), ids_NT)
        expected = logits(with_trained(base, adapter), ids_NT)
    merge(path, adapter, tmp_path / "merged", torch.float32)
    with Base.open(tmp_path / "merged") as merged:
        ours = logits(build(merged), ids_NT)
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids_NT)
    assert (without - expected).abs().max() > 1e-2 * expected.abs().max()
    assert (theirs - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (ours - theirs).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["quantized", "gguf"])
def test_a_quantized_base_becomes_floats(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert_merged(request.getfixturevalue(kind), tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "phi3", "deepseek_v3", "qwen2_moe", "granitemoe"])
def test_a_base_of_another_architecture(name: str, tmp_path: Path) -> None:
    write(name, list(CASES).index(name), tmp_path / "base")
    write_tokenizer(tmp_path / "base", 300, 256)
    assert_merged(tmp_path / "base", tmp_path)


def test_what_is_no_adapter_is_refused(random_model: Path, tmp_path: Path) -> None:
    for folder, message in ((tmp_path, r"adapter_config\.json: No such file"), (tmp_path / "absent", "No such file")):
        with pytest.raises(ModelRefused, match=message):
            merge(random_model, folder, tmp_path / "merged", torch.float32)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["absent"]}')
    with pytest.raises(ModelRefused, match=r"adapter_model\.safetensors: No such file"):
        merge(random_model, tmp_path, tmp_path / "merged", torch.float32)
    assert not (tmp_path / "merged").exists()
