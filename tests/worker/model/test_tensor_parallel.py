"""Ranks as real processes over shared memory, compared with transformers: logits, greedy text, memory, refusals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.rank_processes import answers_of_ranks

from ryzanstein.worker.engine.plan import StepPlan

OPTIONS = {"num_blocks": 64, "block_size": 4, "num_threads": 1, "max_tokens_per_step": 32, "max_sequences": 4}
NUM_GREEDY = {"grouped queries": 64, "another seed": 64, "tied embeddings": 64}  # elsewhere fewer tokens tell as much
FEW_GREEDY = 16

pytestmark = pytest.mark.distributed

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "another seed": {"seed": 1},
    "one key-value head": {"seed": 2, "num_key_value_heads": 1},
    "two key-value heads": {"seed": 3, "num_key_value_heads": 2},
    "as many key-value heads as heads": {"seed": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
    "odd heads in a group": {"seed": 5, "hidden_size": 72, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 10},
    "tied embeddings": {"seed": 6, "tie_word_embeddings": True},
    "vocabulary does not divide": {"seed": 7, "vocab_size": 251},
    "vocabulary does not divide, tied": {"seed": 8, "vocab_size": 5, "tie_word_embeddings": True},
    "biases": {"seed": 9, "attention_bias": True, "mlp_bias": True},
    "half precision on disk, several files": {"seed": 10, "dtype": torch.bfloat16, "max_shard_size": "50KB"},
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, two prompts with their greedy continuations by transformers, and the plans that replay them."""

    model_dir: Path
    ids: list[list[int]]
    prompt_lengths: list[int]
    logits: list[torch.Tensor]
    plans: list[StepPlan]


@pytest.fixture(scope="module")
def cases(checkpoint: Callable[..., Path], reference: Callable[[Path], Any], sequences: type) -> dict[str, Case]:
    return {
        name: _case(checkpoint(**changes), NUM_GREEDY.get(name, FEW_GREEDY), reference, sequences)
        for name, changes in CHECKPOINTS.items()
    }


def _case(model_dir: Path, num_greedy: int, reference: Callable[[Path], Any], sequences: type) -> Case:
    model = reference(model_dir)
    vocab_size = model.model.config.vocab_size
    prompts = [
        torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (23, 6)
    ]
    ids = [prompt + model.greedy(prompt, num_greedy) for prompt in prompts]
    tables = [list(range(0, 50, 2)), list(range(51, 1, -2))]  # never adjacent, one falling
    books = sequences(None, tables)
    books.start(prompts)
    plans = [
        books.plan({0: 7}),
        books.plan({0: 11, 1: 3}),
        books.plan({0: 4, 1: 2}),
        books.plan({0: 1, 1: 1}, full_logits=True),
    ]
    for index in range(num_greedy):
        for s in (0, 1):
            books.ids[s].append(ids[s][len(prompts[s]) + index])
        plans.append(books.plan({0: 1, 1: 1}, full_logits=index % 8 == 3))
    return Case(model_dir, ids, [23, 6], [model.logits(row) for row in ids], plans)


class Group:
    """The answers of one run of several ranks, by checkpoint name."""

    def __init__(self, answers: list[dict[str, Any]], names: Sequence[str]) -> None:
        self.ranks = answers
        self.jobs = {name: [rank["jobs"][i] for rank in answers] for i, name in enumerate(names)}


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["tp1", "tp2", "tp4"])
def group(request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Every checkpoint on so many ranks: the processes start once."""
    directory = tmp_path_factory.mktemp("ranks")
    jobs = [(case.model_dir, OPTIONS, case.plans) for case in cases.values()]
    return Group(answers_of_ranks(directory, request.param, jobs), list(cases))


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.long
def test_logits_equal_those_of_transformers(group: Group, cases: dict[str, Case], name: str) -> None:
    case, answers = cases[name], group.jobs[name][0]["answers"]
    checked = 0
    for plan, answer in zip(case.plans, answers, strict=True):
        if plan.full_logits:
            expected = torch.stack([case.logits[s][plan.num_context[s]] for s in (0, 1)])
            assert (answer - expected).abs().max() < 1e-4
            checked += 1
    assert checked == 1 + NUM_GREEDY.get(name, FEW_GREEDY) // 8


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_text_equals_that_of_transformers(group: Group, cases: dict[str, Case], name: str) -> None:
    case, answers = cases[name], group.jobs[name][0]["answers"]
    checked = 0
    for plan, answer in zip(case.plans, answers, strict=True):
        if len(plan.sampled) == 2 and not plan.full_logits and plan.num_context[0] + 1 < len(case.ids[0]):
            assert answer == [case.ids[s][plan.num_context[s] + 1] for s in (0, 1)]
            checked += 1
    assert checked == NUM_GREEDY.get(name, FEW_GREEDY) * 7 // 8 - 1  # the steps whose logits are compared instead, and the last


def test_ranks_above_0_answer_nothing(group: Group) -> None:
    for jobs in group.jobs.values():
        for job in jobs[1:]:
            assert all(answer is None or answer == [] for answer in job["answers"])


def test_cache_bytes_fall_with_the_key_value_heads_of_a_rank(group: Group) -> None:
    size = len(group.ranks)
    heads, bytes_per_head = {"grouped queries": 4, "one key-value head": 1, "two key-value heads": 2}, 2 * 64 * 4 * 2 * 8 * 4
    for name, num_kv_heads in heads.items():
        assert {job["kv_bytes"] for job in group.jobs[name]} == {max(1, num_kv_heads // size) * bytes_per_head}
        assert {job["num_blocks"] for job in group.jobs[name]} == {64}


def test_shared_memory_computes_what_gloo_does(group: Group) -> None:
    if len(group.ranks) == 1:
        return
    for per_size in zip(*(rank["collectives"] for rank in group.ranks), strict=True):
        assert len({answer["bits"] for answer in per_size}) == 1, "ranks must agree on every bit of a sum"
        for answer in per_size:
            assert answer["all_reduce"] < 1e-5
            assert answer["half"] == 0.5 * len(group.ranks)
            assert answer["integers"]
            assert answer["all_gather"]
            assert answer["all_gather_rows"]
            assert answer["rooted"]
            assert answer["broadcast"]


def test_every_collective_is_reported_and_left(group: Group) -> None:
    expected = ["all_gather", "all_reduce", "broadcast", "gather_to_root"] if len(group.ranks) > 1 else []
    assert all(rank["reported"] == (expected, 0) for rank in group.ranks)
