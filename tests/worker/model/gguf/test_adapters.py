"""Adapters that peft made of a checkpoint, for the same model in a GGUF file, whose rows may be in another order."""

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.worker.model.adapting.lora import Judge, relative
from tests.worker.model.gguf.conftest import write_model
from tests.worker.model.gguf.test_architectures import MODELS

from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.written.lora_gguf import architecture_of, places_of, write_gguf
from ryzanstein.worker.adapters.factors import AdaptedWeight, Adapter
from ryzanstein.worker.adapters.names import is_embedding, is_head
from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.adapters.reading import read_adapter
from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions

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


OFTEN = ("llama with biases", "gemma3", "gpt2", "phi3", "cohere", "qwen2_moe", "lfm2")
REFUSED = ("qwen3_next", "granitemoehybrid", "granitemoehybrid, experts")
"""Those have weights that take an adapter and are not in a file as they are: none is written, and none read."""
NAMES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.lab) for name in MODELS if name not in REFUSED]


def product(adapted: AdaptedWeight) -> Any:
    return adapted.b_OR @ adapted.a_RI * np.float32(adapted.scale)


def written(file: Path, base: Path, adapter: Adapter) -> Path:
    """Writes an adapter as `ryzanstein finetune` does, which llama.cpp judges in the laboratory."""
    pairs = {f"{name}.weight": (each.a_RI, each.b_OR * np.float32(each.scale)) for name, each in adapter.weights.items()}
    with Base.open(base) as opened:
        write_gguf(file, architecture_of(opened), places_of(opened), pairs, "it")
    return file


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_in_a_file_is_what_was_written(name: str, tiny: Any, to_gguf: Any, runner: Any, tmp_path: Path) -> None:
    """For a base in a directory and in a file. The file has no place for some weights: those are not in the adapter."""
    model_type, changes = MODELS[name]
    model_dir = tiny(model_type, **changes)
    for model in (model_dir, to_gguf(model_dir)):
        adaptable = runner(model).adaptable
        expected = random_adapter({each: shape for each, shape in adaptable.items() if not is_head(each)})
        file = written(tmp_path / "adapter.gguf", model, expected)
        found = read_adapter(file, adaptable, model)
        assert found.weights.keys() == expected.weights.keys()
        for weight, adapted in found.weights.items():
            assert np.allclose(product(adapted), product(expected.weights[weight]), rtol=1e-4, atol=1e-5), weight


def random_adapter(shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    numbers = np.random.default_rng(1)

    def factors(inputs: int, outputs: int) -> AdaptedWeight:
        return AdaptedWeight(*(numbers.standard_normal(size, np.float32) for size in ((4, inputs), (outputs, 4))), None, 2.0)

    return Adapter({name: factors(*shape) for name, shape in shapes.items() if not is_embedding(name)})


def changed(
    file: Path, metadata: dict[str, Any] | None = None, tensors: Callable[[dict[str, Any]], None] = lambda _: None
) -> Path:
    """Writes an adapter's file with other metadata, None for none of a key, or other tensors; by the library of llama.cpp."""
    reader = gguf.GGUFReader(file)
    values = {field.name: field.contents() for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    values |= metadata or {}
    numbers = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    tensors(numbers)
    other = file.with_name("changed.gguf")
    writer = gguf.GGUFWriter(other, str(values.pop("general.architecture") or "none"))
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_float32(key, value)
    for name, each in numbers.items():
        writer.add_tensor(name, each)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return other


Q, K = "blk.0.attn_q.weight.lora_", "blk.0.attn_k.weight.lora_"


def _not_a_number(tensors: dict[str, Any]) -> None:
    tensors[f"{Q}b"][1, 1] = np.nan


UNFIT: list[tuple[dict[str, Any], Callable[[dict[str, Any]], Any], str]] = [
    ({"general.type": "model"}, lambda _: None, "general.type: is 'model', must be 'adapter'"),
    ({"adapter.type": "control_vector"}, lambda _: None, "adapter.type: is 'control_vector'"),
    ({"general.architecture": "gemma3"}, lambda _: None, "general.architecture: is 'gemma3', must be 'llama'"),
    ({"adapter.lora.alpha": None}, lambda _: None, "adapter.lora.alpha: must be a finite number"),
    ({"adapter.lora.alpha": float("inf")}, lambda _: None, "adapter.lora.alpha: must be a finite number"),
    ({"adapter.alora.invocation_tokens": [1, 2]}, lambda _: None, "adapter.alora.invocation_tokens: "),
    ({}, lambda tensors: tensors.pop(f"{Q}a"), f"{Q}b: the other factor is missing"),
    ({}, lambda tensors: tensors.pop(f"{K}b"), f"{K}a: the other factor is missing"),
    ({}, lambda tensors: tensors.update({f"{Q}a": tensors[f"{Q}a"][:, :-1].copy()}), f"{Q}a: has shape"),
    ({}, lambda tensors: tensors.update({f"{Q}b": tensors[f"{K}b"]}), f"{Q}b: has shape"),
    (
        {},
        lambda tensors: tensors.update({"blk.9.attn_q.weight.lora_a": tensors[f"{Q}a"]}),
        "blk.9.attn_q.weight.lora_a: the other",
    ),
    ({}, lambda tensors: tensors.update({"blk.0.attn_norm.weight": tensors[f"{Q}a"]}), "blk.0.attn_norm.weight: is no factor"),
    ({}, _not_a_number, f"{Q}b: has numbers that are not finite"),
]


@pytest.fixture(scope="module")
def of_a_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A model, an adapter's file of it, and its weights that take an adapter."""
    folder = tmp_path_factory.mktemp("llama")
    model_dir = write_model(folder / "model", "llama", torch.float32)
    runner = ModelRunner.load(model_dir, TensorParallel(0, 1, LocalCollectives()), RunnerOptions())
    layers = {name: shape for name, shape in runner.adaptable.items() if ".layers." in name}
    return model_dir, written(folder / "adapter.gguf", model_dir, random_adapter(layers)), runner.adaptable


@pytest.mark.parametrize("case", UNFIT, ids=[message[:40] for _, _, message in UNFIT])
def test_a_file_that_does_not_fit_is_refused_by_what_is_wrong(case: Any, of_a_llama: tuple[Path, Path, Any]) -> None:
    (metadata, tensors, message), (model_dir, file, adaptable) = case, of_a_llama
    with pytest.raises(AdapterUnfit, match=re.escape(message)):
        read_adapter(changed(file, metadata, tensors), adaptable, model_dir)


def test_a_file_cut_anywhere_is_refused(of_a_llama: tuple[Path, Path, Any], tmp_path: Path) -> None:
    model_dir, file, adaptable = of_a_llama
    content = file.read_bytes()
    for part in range(16):
        (tmp_path / "cut.gguf").write_bytes(content[: len(content) * part // 16])
        with pytest.raises(AdapterUnfit):
            read_adapter(tmp_path / "cut.gguf", adaptable, model_dir)


def test_types_of_fewer_bits_and_an_alpha_of_zero_are_read(of_a_llama: tuple[Path, Path, Any]) -> None:
    model_dir, file, adaptable = of_a_llama
    whole = read_adapter(file, adaptable, model_dir)

    def halved(tensors: dict[str, Any]) -> None:
        tensors.update({name: each.astype(np.float16) for name, each in tensors.items()})

    half = read_adapter(changed(file, {"adapter.lora.alpha": 0.0}, halved), adaptable, model_dir)
    for name, adapted in half.weights.items():
        assert adapted.scale == 1.0
        assert np.allclose(product(adapted), product(whole.weights[name]), rtol=1e-2, atol=1e-2)


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
