"""Adapters that peft made of a checkpoint, for the same model in a GGUF file, whose rows may be in another order."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.adapting.lora import Judge, relative

from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.adapters.reading import read_adapter
from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.engine.plan import StepPlan

HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
IDS = random.Random(1).choices(range(3, 320), k=21)


def logits(loaded: Any, adapter: int) -> Any:
    return loaded.hidden_logits(StepPlan(1, IDS, [21], [0], [list(range(6))], [0], True, adapters=[(adapter, 21)]))[0]


@pytest.fixture
def both(tiny: Any, to_gguf: Any, reference: Any, runner: Any, tmp_path: Path) -> Callable[..., tuple[Judge, Any]]:
    """A checkpoint with its judge, and the file of it, loaded."""

    def load(model_type: str, **changes: int) -> tuple[Judge, Any]:
        base = tiny(model_type, **changes)
        return Judge(base, tmp_path, reference(base).model), runner(to_gguf(base))

    return load


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2"])
def test_a_file_takes_the_adapters_of_its_checkpoint(
    model_type: str, both: Callable[..., tuple[Judge, Any]], tmp_path: Path
) -> None:
    judge, loaded = both(model_type)
    directory = judge.adapt("one", 1, r=4, lora_alpha=9, target_modules=judge.targets(ends=False))
    pack(read_adapter(directory, loaded.adaptable), tmp_path / "packed")
    loaded.map_adapter(1, tmp_path / "packed")
    plain, expected = judge.logits(IDS, None)[-1], judge.logits(IDS, "one")[-1]
    assert relative(logits(loaded, 1), expected) < 1e-4
    assert relative(plain, expected) > 0.05


def test_projections_whose_heads_a_file_has_in_another_order_are_refused(
    both: Callable[..., tuple[Judge, Any]], runner: Callable[..., Any], tmp_path: Path
) -> None:
    judge, loaded = both("qwen3_5_text", **HYBRID)
    targets = judge.targets(ends=False)
    others = [target for target in targets if "linear_attn" not in target]
    read_adapter(judge.adapt("all", 1, r=4, target_modules=targets), runner(judge.base).adaptable)
    with pytest.raises(AdapterUnfit, match="linear_attn"):
        read_adapter(tmp_path / "adapters" / "all", loaded.adaptable)
    directory = judge.adapt("others", 2, r=4, target_modules=others)
    pack(read_adapter(directory, loaded.adaptable), tmp_path / "packed")
    loaded.map_adapter(1, tmp_path / "packed")
    assert relative(logits(loaded, 1), judge.logits(IDS, "others")[-1]) < 3e-4
