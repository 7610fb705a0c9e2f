"""Every field of peft's LoraConfig: it is served with peft's result, or refused by its name. A new field fails here."""

import dataclasses
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.worker.model.adapting.lora import Judge, relative
from tests.worker.model.adapting.test_judge import OPTIONS, TABLE

from ryzanstein.worker.adapters.config import HARMLESS, REFUSED, SERVED
from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.adapters.reading import CONFIG, read_adapter
from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.engine.plan import StepPlan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig

FIELDS = {field.name for field in dataclasses.fields(LoraConfig)}
PLAIN = {"r": 4, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}
MADE: dict[str, list[dict[str, Any]]] = {
    "r": [{"r": 1}, {"r": 33}],
    "lora_alpha": [{"lora_alpha": 1}, {"lora_alpha": 0}],
    "use_rslora": [{"use_rslora": True}],
    "rank_pattern": [
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 7}},
        {"rank_pattern": {"^model.layers.0.self_attn.v_proj": 3, "proj": 5}},
    ],
    "alpha_pattern": [{"alpha_pattern": {"self_attn.q_proj": 1, r".*\.1\..*": 30, "v_proj": 2}}],
    "lora_bias": [{"lora_bias": True}],
    "target_modules": [
        {"target_modules": r".*\.(0|1)\.self_attn\.[qk]_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["model.layers.1.mlp.down_proj", "k_proj"]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"target_modules": ["lm_head"]},
    ],
    "exclude_modules": [
        {"exclude_modules": ["o_proj", "model.layers.0.self_attn.q_proj"]},
        {"exclude_modules": r".*\.mlp\..*"},
    ],
    "layers_to_transform": [{"layers_to_transform": 1}, {"layers_to_transform": [0]}, {"layers_to_transform": []}],
    "layers_pattern": [{"layers_to_transform": [1], "layers_pattern": "layers"}],
    "ensure_weight_tying": [
        {"ensure_weight_tying": True},
        {"ensure_weight_tying": True, "target_modules": ["embed_tokens", "q_proj"]},
    ],
    "lora_dropout": [{"lora_dropout": 0.5}],
    "fan_in_fan_out": [{"fan_in_fan_out": True}],
    "inference_mode": [{"inference_mode": True}],
    "init_lora_weights": [{"init_lora_weights": kind} for kind in ("gaussian", "orthogonal", "mica", True)],
    "task_type": [{"task_type": "CAUSAL_LM"}, {"task_type": "FEATURE_EXTRACTION"}],
    "revision": [{"revision": "main"}],
    "qalora_group_size": [{"qalora_group_size": 4}],
    "megatron_core": [{"megatron_core": "elsewhere"}],
}
"""Configurations that peft makes an adapter of, by the field that they try."""
WRITTEN: dict[str, list[Any]] = {
    "peft_type": ["LOHA", None],
    "task_type": ["SEQ_CLS"],
    "bias": ["all", "lora_only"],
    "init_lora_weights": ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new"],
    "use_dora": [True],
    "modules_to_save": [["lm_head"]],
    "trainable_token_indices": [[3], {"embed_tokens": [3]}],
    "target_parameters": [["experts.gate_up_proj"]],
    "layer_replication": [[[0, 2], [1, 2]]],
    "alora_invocation_tokens": [[5, 6]],
    "use_qalora": [True],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 3}],
    "kasa_config": [{"beta": 1}],
    "velora_config": [{"num_groups": 2}],
    "monteclora_config": [{"samples": 2}],
    "megatron_config": [{"tensor_model_parallel_size": 2}],
    "loftq_config": [{"loftq_bits": 4}],
    "corda_config": [{"rank": 4}],
    "lora_ga_config": [{"direction": "ArB2r"}],
    "r": [0, 513, "8", True, 2.0],
    "lora_alpha": ["16", float("nan"), 1e40],
    "rank_pattern": [{"q_proj": 0}, {"(": 4}, ["q_proj"]],
    "alpha_pattern": [{"q_proj": "1"}, {"[": 4}],
    "use_rslora": ["yes"],
    "lora_bias": [1],
    "target_modules": ["(", 5, [1], {"q_proj": 1}, r"((a+)+)+b", r"(q|q_proj)*x", ".*.*.*.*.*.*x", "q" * 10_001],
    "exclude_modules": ["[", 5],
    "layers_to_transform": ["1", [1.5], True],
    "layers_pattern": [["("], 5],
    "ensure_weight_tying": ["no"],
}
"""Values in the file that are refused by the field's name."""
UNREAD = {"auto_mapping", "peft_version", "base_model_name_or_path", "runtime_config", "eva_config"}
"""Fields that say where an adapter is from, or how it was trained. Of `eva_config` peft needs data."""


def test_every_field_of_peft_is_tried_here() -> None:
    assert set(MADE) | set(WRITTEN) | UNREAD == FIELDS


def test_every_field_of_peft_is_known() -> None:
    known = SERVED | HARMLESS | set(REFUSED) | {"peft_type", "task_type", "bias", "init_lora_weights"}
    assert known == FIELDS


@pytest.fixture(scope="module")
def base(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def loaded(base: Path, runner: Callable[..., Any]) -> Any:
    return runner(base, **OPTIONS)


@pytest.mark.parametrize(
    "config", [pytest.param(config, id=f"{field}-{i}") for field in MADE for i, config in enumerate(MADE[field])]
)
def test_a_field_gives_the_result_of_peft(
    config: dict[str, Any], base: Path, loaded: Any, reference: Callable[[Path], Any], tmp_path: Path
) -> None:
    judge = Judge(base, tmp_path, reference(base).model)
    directory = judge.adapt("tried", 1, **{**PLAIN, **config})
    with torch.no_grad():  # some ways to begin make B or A zero
        for name, factor in judge.model.named_parameters():
            if "lora_" in name:
                factor.add_(0.1 * torch.randn_like(factor))
    judge.save("tried")
    again = Judge(base, tmp_path, reference(base).model)
    again.read("read", directory)
    ids = random.Random(1).choices(range(3, 251), k=20)
    pack(read_adapter(directory, loaded.adaptable, base), tmp_path / "packed")
    loaded.map_adapter(1, tmp_path / "packed")
    plan = StepPlan(1, ids, [20], [0], [TABLE], [0], True, adapters=[(1, 20)])
    expected, plain = again.logits(ids, "read")[-1], again.logits(ids, None)[-1]
    assert relative(loaded.hidden_logits(plan)[0], expected) < 1e-4
    assert relative(loaded.hidden_logits(msgspec.structs.replace(plan, adapters=[]))[0], plain) < 1e-4
    assert config.get("lora_alpha") == 0 or relative(plain, expected) > 0.003


@pytest.fixture(scope="module")
def saved(base: Path, reference: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Judge(base, tmp_path_factory.mktemp("saved"), reference(base).model).adapt("saved", **PLAIN)


@pytest.mark.parametrize(
    ("field", "value"), [pytest.param(field, value, id=f"{field}-{value}") for field in WRITTEN for value in WRITTEN[field]]
)
def test_a_value_is_refused_by_the_name_of_its_field(field: str, value: Any, saved: Path, loaded: Any, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((saved / CONFIG).read_text())
    read_adapter(tmp_path, loaded.adaptable)
    (tmp_path / CONFIG).write_text(json.dumps({**config, field: value}))
    with pytest.raises(AdapterUnfit) as refused:
        read_adapter(tmp_path, loaded.adaptable)
    assert refused.value.where == field
    assert field in str(refused.value)


@pytest.mark.parametrize("value", [None, False, {}, [], ""], ids=str)
def test_an_unknown_field_may_be_empty(value: Any, saved: Path, loaded: Any, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((saved / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "use_newer": value}))
    read_adapter(tmp_path, loaded.adaptable)
    (tmp_path / CONFIG).write_text(json.dumps({**config, "use_newer": value or 1}))
    with pytest.raises(AdapterUnfit, match="use_newer"):
        read_adapter(tmp_path, loaded.adaptable)
