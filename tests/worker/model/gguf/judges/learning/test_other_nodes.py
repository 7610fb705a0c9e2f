"""Adapters on nodes that quantize otherwise than the training did, and on another model than theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.gguf.judges.learning.conftest import ADAPTER, LearnedModel
from tests.worker.model.gguf.judges.learning.facts import facts, share, valid

from ryzanstein.cli.processes.cluster import ClusterSpec
from ryzanstein.demo import MODEL_DIR
from ryzanstein.tools.finetune.base.adapter import targets_of, with_adapter
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.request import FinetuneRequest, LoraShape, Schedule
from ryzanstein.tools.finetune.run import finetune
from ryzanstein.tools.finetune.written.adapter import write_adapter

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3000)]
NAMES, CITIES = ("Anna", "Ben", "Cara", "Dan", "Eva", "Finn"), ("Rome", "Oslo", "Lima", "Bern", "Kyiv")
NUM_ASKED = 30


def lives() -> list[tuple[str, str]]:
    """What is said to the demonstration model, and what it is to answer."""
    return [(f"{name} lives in {city}.", f"City: {city}. Name: {name}.") for name in NAMES for city in CITIES]


def untrained(file: Path, folder: Path) -> Path:
    """An adapter that changes nothing, of a model."""
    with Base.open(file) as base:
        model = build(base)
        adapted = with_adapter(model, targets_of(model, base.spec, ("all",)), LoraShape(4, 8.0), seed=0)
    folder.mkdir()
    write_adapter(adapted, folder)
    return folder


def test_a_node_that_rounds_the_file_to_8_bits_has_the_format_and_refuses_an_adapter_of_another_model(
    learned: LearnedModel, serve: Callable[..., Any], smollm2: Path, gemma_file: Path, tmp_path: Path
) -> None:
    asked = [(ADAPTER, fact.said) for fact in facts(NUM_ASKED, 2)]
    foreign = untrained(gemma_file if learned.file == smollm2 else smollm2, tmp_path / "foreign")
    with serve(learned.spec(rank_flags=("--quantization", "int8"))) as model:
        model.add(learned.adapter)
        before = model.ask_all(asked)
        refused = model.add(foreign, "foreign", code=1)
        after = model.ask_all(asked)
    print(f"{learned.name}: {refused}")
    assert share([valid(each.text) for each in before]) >= 0.95
    assert re.search(
        r"adapter 'foreign': \S*layers\.\d+\.\S+: (has shape .* the weight has|the model has no such weight)", refused
    )
    assert after == before


@pytest.mark.parametrize("int8", [True, False])
def test_an_adapter_of_a_base_in_8_bits_answers_on_nodes_with_either(
    int8: bool, serve: Callable[..., Any], tmp_path: Path
) -> None:
    taught = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in lives()]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in taught))
    schedule = Schedule(epochs=20, learning_rate=5e-3, max_length=64)
    request = FinetuneRequest(
        MODEL_DIR, tmp_path / "data.jsonl", tmp_path / ADAPTER, None, LoraShape(8, 16.0), schedule, int8=int8
    )
    finetune(request, StringIO())
    for quantization in ("int8", "none"):
        with serve(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, rank_flags=("--quantization", quantization))) as model:
            model.add(tmp_path / ADAPTER)
            found = model.ask_all([(ADAPTER, said) for said, _ in lives()])
        right = share([heard.text.strip() == told for heard, (_, told) in zip(found, lives(), strict=True)])
        print(f"trained with {'int8' if int8 else 'none'}, served with {quantization}: {right:.0%} right")
        assert right >= 0.9
