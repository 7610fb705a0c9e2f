"""Adapters of every architecture against peft: logits of one batch whose sequences have none, one, or another adapter."""

import functools
import operator
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.adapting.lora import Judge, relative
from tests.worker.model.architectures.checkpoints import ADDED_TWICE, CASES, at_its_mark
from tests.worker.model.rank_processes import answers_of_ranks

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.adapters.reading import read_adapter
from ryzanstein.worker.engine.plan import SampleRow, StepPlan

OPTIONS = {"num_blocks": 80, "num_states": 80, "block_size": 4, "num_threads": 1, "max_tokens_per_step": 64, "max_sequences": 4}
TABLE = list(range(48, 64))
ADAPTERS: tuple[str | None, ...] = (None, "wide", "ends")
LENGTHS = (23, 31, 17)
ARCHITECTURES = list({name.split(" ")[0]: name for name in reversed(CASES)}.values())
FEW = ("llama", "gpt2")
ON_TWO_RANKS = (
    "llama",
    "gpt2",
    "bloom",
    "deepseek_v2",
    "qwen2_moe",
    "lfm2",
    "qwen3_5_text",
    "granitemoehybrid states",
    "gemma4_text",
)


def judge_of(name: str, folder: Path) -> Judge:
    """Two adapters: one of all linears with a bias, its ranks and scales by pattern; one of the ends and a few linears."""
    judge = Judge.of(name, 5, folder)
    targets = judge.targets(ends=False)
    patterns = {"rank_pattern": {targets[0]: 3, r"1\..*": 9}, "alpha_pattern": {r".*proj": 3, targets[-1]: 21}}
    head = [target for target in judge.targets(ends=True) if target in ("lm_head", "embed_out")]
    judge.adapt("wide", 1, r=6, lora_alpha=13, use_rslora=True, lora_bias=True, target_modules=targets + head, **patterns)
    judge.adapt("ends", 2, r=20, lora_alpha=10, target_modules=sorted({*judge.targets(ends=True)} - {*targets[::2]}))
    return judge


def sequence_ids(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 251) for _ in range(length)] for length in LENGTHS]


def plans_of(ids: Sequence[Sequence[int]]) -> list[StepPlan]:
    """All prompts but their last tokens, the first of which is cut in two; then all last tokens in another order."""
    tables = [list(range(16)), list(range(16, 32)), list(range(32, 48))]
    fed, plans = [0] * len(ids), []
    for members in ([(0, 9), (1, 30)], [(2, 16), (0, 13)], [(2, 1), (0, 1), (1, 1)]):
        rows = [s for s, _ in members]
        tokens = [token for s, count in members for token in ids[s][fed[s] : fed[s] + count]]
        counts, context = [count for _, count in members], [fed[s] for s in rows]
        runs = [(ADAPTERS.index(ADAPTERS[s]), count) for s, count in members]
        plan = StepPlan(1, tokens, counts, context, [tables[s] for s in rows], list(range(len(rows))), True, adapters=runs)
        for s, count in members:
            fed[s] += count
        plans.append(plan)
    return plans


def differences(judge: Judge, ids: Sequence[Sequence[int]], answers: Sequence[torch.Tensor]) -> list[float]:
    """Of each row of the plans' logits."""
    expected = [judge.logits(row, adapter) for row, adapter in zip(ids, ADAPTERS, strict=True)]
    assert relative(expected[1], judge.logits(ids[1], None)) > 0.05, "the adapter does too little to be judged"
    assert relative(expected[2], judge.logits(ids[2], None)) > 0.05, "the adapter does too little to be judged"
    rows = [[(0, 8), (1, 29)], [(2, 15), (0, 21)], [(2, 16), (0, 22), (1, 30)]]
    return [
        relative(found, expected[s][position])
        for logits, places in zip(answers, rows, strict=True)
        for found, (s, position) in zip(logits, places, strict=True)
    ]


def tolerance(name: str) -> float:
    """Of delta rules and Mamba 2 transformers' own float32 is less exact: see `test_architectures`."""
    return 3e-4 if name.startswith(("qwen3_5", "qwen3_next")) or "states" in name else 1e-4


def check(name: str, folder: Path, runner: Callable[..., Any]) -> None:
    judge, ids = judge_of(name, folder), sequence_ids(3)
    loaded = runner(judge.base, **OPTIONS)
    for slot, adapter in enumerate(ADAPTERS):
        if adapter is not None:
            loaded.map_adapter(slot, judge.pack(adapter, loaded.adaptable))
    answers = [loaded.hidden_logits(plan) for plan in plans_of(ids)]
    assert max(differences(judge, ids, answers)) < tolerance(name)


@pytest.mark.parametrize("name", FEW)
def test_logits_equal_those_of_peft(name: str, tmp_path: Path, runner: Callable[..., Any]) -> None:
    check(name, tmp_path, runner)


@pytest.mark.parametrize("name", at_its_mark(name for name in ARCHITECTURES if name not in (*FEW, *ADDED_TWICE)))
def test_logits_of_every_architecture_equal_those_of_peft(name: str, tmp_path: Path, runner: Callable[..., Any]) -> None:
    check(name, tmp_path, runner)


def test_torch_operators_give_the_logits_of_peft(tmp_path: Path, runner: Callable[..., Any]) -> None:
    check("llama", tmp_path, lambda *args, **options: runner(*args, **options, kernels="torch"))


def test_factors_of_16_bits_give_nearly_the_logits_of_peft(tmp_path: Path, runner: Callable[..., Any]) -> None:
    """Also small ones, of which float16 itself would keep little."""
    judge, ids = Judge.of("llama", 5, tmp_path), sequence_ids(3)[0]
    directory = judge.adapt("small", 1, r=9, lora_alpha=3e7, target_modules=judge.targets(ends=True))
    with torch.no_grad():
        for name, factor in judge.model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                factor.mul_(1e-7)
    judge.save("small")
    expected, plain = judge.logits(ids, "small")[-1], judge.logits(ids, None)[-1]
    assert relative(plain, expected) > 0.05
    for kernels in ("native", "torch"):
        loaded = runner(judge.base, **OPTIONS, kernels=kernels)
        pack(read_adapter(directory, loaded.adaptable, judge.base), tmp_path / "packed", half=True)
        loaded.map_adapter(1, tmp_path / "packed")
        plan = StepPlan(1, ids, [23], [0], [TABLE], [0], True, adapters=[(1, 23)])
        assert relative(loaded.hidden_logits(plan)[0], expected) < 5e-3


def test_scores_and_tokens_are_those_of_each_row(tmp_path: Path, runner: Callable[..., Any]) -> None:
    """The head multiplies the wanted rows alone, which it numbers anew; it scores so many of them at once."""
    judge, ids = judge_of("llama", tmp_path), [row[:16] for row in sequence_ids(5)]
    loaded = runner(judge.base, **OPTIONS)
    for slot, adapter in enumerate(ADAPTERS):
        if adapter is not None:
            loaded.map_adapter(slot, judge.pack(adapter, loaded.adaptable))
    tables, runs = [list(range(4 * s, 4 * s + 4)) for s in range(3)], [(slot, 16) for slot in range(3)]
    scored = [16 * s + t for s in range(3) for t in range(15)]
    targets = [row[t + 1] for row in ids for t in range(15)]
    lists = {"scored": scored, "targets": targets, "adapters": runs}
    plan = StepPlan(1, functools.reduce(operator.iadd, ids, []), [16] * 3, [0] * 3, tables, [0, 2], **lists)
    greedy = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())
    first, last, *scores = loaded.execute(plan, [greedy] * 2)
    logits = [judge.logits(row, adapter) for row, adapter in zip(ids, ADAPTERS, strict=True)]
    assert [first.token_id, last.token_id] == [logits[0][-1].argmax(), logits[2][-1].argmax()]
    expected = [each.log_softmax(dim=1)[t, row[t + 1]].item() for each, row in zip(logits, ids, strict=True) for t in range(15)]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-3)


@pytest.mark.distributed
@pytest.mark.long
def test_logits_of_two_ranks_equal_those_of_peft(tmp_path: Path, runner: Callable[..., Any]) -> None:
    ids, jobs, judges = sequence_ids(4), [], []
    for number, name in enumerate(ON_TWO_RANKS):
        judge = judge_of(name, tmp_path / str(number))
        adaptable = runner(judge.base, **OPTIONS).adaptable
        packed = {slot: judge.pack(adapter, adaptable) for slot, adapter in enumerate(ADAPTERS) if adapter is not None}
        judges.append(judge)
        jobs.append((judge.base, OPTIONS, plans_of(ids), packed))
    for name, judge, job in zip(ON_TWO_RANKS, judges, answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"], strict=True):
        assert max(differences(judge, ids, job["answers"])) < tolerance(name), name
