"""A row has the same bits in any company: of rows with no adapter, with the same one, or with others, of other ranks."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.worker.model.adapting.lora import Judge
from tests.worker.model.architectures.checkpoints import CASES
from tests.worker.model.rank_processes import answers_of_ranks
from tests.worker.model.schedules import Rows, Schedules, Steps, differing, rows_of, run

SCHEDULES = Schedules()
OPTIONS = {**SCHEDULES.options, "kernels": "native"}
RANKS = {1: 8, 2: 64, 3: 5}
"""Of the adapters in slots."""
ASSIGNED = ((1, 2, 1), (0, 1, 0), (3, 0, 3))
"""The slots of the three sequences; the third may begin with pages of the first."""
KINDS = (
    "gpt2",
    "gemma2",
    "bloom",
    "deepseek_v3",
    "qwen2_moe",
    "lfm2 several planes",
    "qwen3_5_text",
    "granitemoehybrid states",
)
FORMATS: tuple[dict[str, str], ...] = ({"quantization": "fp16"}, {"quantization": "int8"}, {"kv_dtype": "float16"})


def packed_adapters(judge: Judge, adaptable: Any) -> dict[int, Path]:
    """One of all linears, the ends too; one of half of them; one with a bias."""
    targets, linears = judge.targets(ends=True), judge.targets(ends=False)
    judge.adapt("slot1", 1, r=RANKS[1], target_modules=targets)
    judge.adapt("slot2", 2, r=RANKS[2], lora_alpha=64, target_modules=linears[::2])
    judge.adapt("slot3", 3, r=RANKS[3], target_modules=linears, lora_bias=True)
    return {slot: judge.pack(f"slot{slot}", adaptable) for slot in RANKS}


def adapted(steps: Steps, slots: Sequence[int]) -> Steps:
    """The same steps of sequences that have these adapters."""
    found = []
    for plan, rows in steps:
        runs = [(slots[s], count) for (s, _), count in zip(rows, plan.num_new, strict=True)]
        found.append((msgspec.structs.replace(plan, adapters=runs if any(slot for slot, _ in runs) else []), rows))
    return found


def check(loaded: Any, packed: dict[int, Path], num_schedules: int = 2) -> None:
    ids = SCHEDULES.sequence_ids()
    loaded.forgets = False
    alone = SCHEDULES.alone(ids)
    plain = run(loaded, alone)
    for slot, path in packed.items():
        loaded.map_adapter(slot, path)
    assert not differing(plain, run(loaded, alone)), "mapped adapters changed rows that have none"
    own = {slots: run(loaded, adapted(alone, slots)) for slots in ASSIGNED}
    loaded.forgets = True
    for slots, expected in own.items():
        refuse_equal(plain, expected, slots)
        for seed in range(num_schedules):
            steps = adapted(SCHEDULES.company(ids, random.Random(seed)), slots)
            wrong = differing(expected, run(loaded, steps, num_threads=1 if seed % 2 else 2 + seed // 2 % 2))
            assert not wrong, f"{slots}, schedule {seed}: {len(wrong)} rows, the first {wrong[0]}"
    loaded.drop_adapter(2)
    assert not differing(plain, run(loaded, alone)), "a dropped adapter left something"


def refuse_equal(plain: Rows, expected: Rows, slots: Sequence[int]) -> None:
    """Rows without an adapter are those of a model without any; all others differ."""
    wrong = {(s, position) for s, position, _ in differing(plain, expected)}
    assert wrong == {key for key in plain if slots[key[0]]}


def test_a_model_of_usual_widths(
    checkpoint: Callable[..., Path], reference: Callable[[Path], Any], runner: Callable[..., Any], tmp_path: Path
) -> None:
    """Wide enough for several panels, parts and threads."""
    base = checkpoint(hidden_size=256, head_dim=32, intermediate_size=331, vocab_size=1003)
    judge, loaded = Judge(base, tmp_path, reference(base).model), runner(base, **OPTIONS)
    check(loaded, packed_adapters(judge, loaded.adaptable))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.long
def test_other_architectures(name: str, runner: Callable[..., Any], tmp_path: Path) -> None:
    judge = Judge.of(name, list(CASES).index(name), tmp_path)
    loaded = runner(judge.base, **OPTIONS)
    check(loaded, packed_adapters(judge, loaded.adaptable), num_schedules=1)


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.long
def test_other_formats(options: dict[str, str], runner: Callable[..., Any], tmp_path: Path) -> None:
    judge = Judge.of("llama", 0, tmp_path)
    loaded = runner(judge.base, **OPTIONS, **options)
    check(loaded, packed_adapters(judge, loaded.adaptable), num_schedules=1)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"kv_dtype": "float16"}], ids=str)
def test_a_native_call_computes_what_calls_for_each_layer_do(
    options: dict[str, str], runner: Callable[..., Any], tmp_path: Path
) -> None:
    check_paths("llama", runner, tmp_path, options)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "phi", "nemotron", "bloom", "qwen2_moe", "stablelm parallel", "olmo2"])
@pytest.mark.long
def test_native_calls_of_other_architectures(name: str, runner: Callable[..., Any], tmp_path: Path) -> None:
    check_paths(name, runner, tmp_path, {})


def check_paths(name: str, runner: Callable[..., Any], folder: Path, options: dict[str, str]) -> None:
    judge, ids, found = Judge.of(name, list(CASES).index(name), folder), SCHEDULES.sequence_ids(), []
    packed = None
    for step in ("auto", "python"):
        loaded = runner(judge.base, **OPTIONS, **options, step=step)
        packed = packed or packed_adapters(judge, loaded.adaptable)
        for slot, path in packed.items():
            loaded.map_adapter(slot, path)
        assert (loaded._decoder._adapted is None) == (step == "python")
        schedules = [adapted(SCHEDULES.company(ids, random.Random(seed)), slots) for seed, slots in enumerate(ASSIGNED)]
        found.append([run(loaded, steps, num_threads=2) for steps in schedules])
    for native, python in zip(*found, strict=True):
        assert not differing(python, native)


@pytest.mark.distributed
@pytest.mark.lab
def test_two_ranks(runner: Callable[..., Any], tmp_path: Path) -> None:
    ids, names, slots = SCHEDULES.sequence_ids(), ("llama", "deepseek_v3", "qwen3_5_text"), ASSIGNED[0]
    parts = [SCHEDULES.alone(ids), adapted(SCHEDULES.alone(ids), slots)]
    parts += [adapted(SCHEDULES.company(ids, random.Random(seed)), slots) for seed in range(2)]
    jobs = []
    for name in names:
        judge = Judge.of(name, list(CASES).index(name), tmp_path / name)
        packed = packed_adapters(judge, runner(judge.base, **OPTIONS).adaptable)
        jobs.append((judge.base, {**OPTIONS, "num_threads": 1}, [plan for steps in parts for plan, _ in steps], packed))
    for name, job in zip(names, answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"], strict=True):
        answers = iter(job["answers"])
        plain, expected, *others = (rows_of(steps, [next(answers) for _ in steps]) for steps in parts)
        refuse_equal(plain, expected, slots)
        for rows in others:
            assert not differing(expected, rows), name
