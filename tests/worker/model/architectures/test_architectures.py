"""Every architecture against transformers: small random checkpoints that it writes, answered by one rank and by two.

Shapes are odd on purpose: six heads, a vocabulary that does not divide, windows shorter than the prompt, chunks of any size.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.architectures.checkpoints import CASES, write
from tests.worker.model.rank_processes import answers_of_ranks

from ryzanstein.worker.architectures.registry import ARCHITECTURES
from ryzanstein.worker.engine.plan import StepPlan

pytestmark = pytest.mark.distributed

OPTIONS = {"num_blocks": 80, "num_states": 80, "block_size": 4, "num_threads": 1, "max_tokens_per_step": 32, "max_sequences": 4}
NUM_GREEDY = 48
PROMPT = 41
REUSED = 20  # tokens of the first prompt whose blocks another sequence starts with: more than a window


@dataclass(frozen=True)
class Case:
    """A checkpoint, three sequences with transformers' logits of every position, and the plans that replay them.

    The first continues greedily, the second with random tokens, the third begins with blocks of the first.
    """

    model_dir: Path
    ids: list[list[int]]
    logits: list[torch.Tensor]
    plans: list[StepPlan]


def case_has_states(name: str) -> bool:
    """Of a delta rule and of Mamba 2 transformers computes chunks: in float32 its logits are up to 2e-4 from float64's."""
    return name.startswith(("qwen3_5", "qwen3_next")) or "states" in name


def make_case(name: str, seed: int, model_dir: Path, sequences: type) -> Case:
    return case_of(write(name, seed, model_dir), seed, model_dir, sequences)


@torch.inference_mode()
def case_of(model: Any, seed: int, model_dir: Path, sequences: type) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(length: int) -> list[int]:
        return torch.randint(3, 251, (length,), generator=generator).tolist()

    first = _greedy(model, random(PROMPT))
    ids = [first, random(6 + NUM_GREEDY), first[:REUSED] + random(9)]
    logits = [model(torch.tensor([row])).logits[0].float() for row in ids]
    return Case(model_dir, ids, logits, _plans(ids, sequences))


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_GREEDY,
            min_new_tokens=NUM_GREEDY,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0].tolist()


def _plans(ids: list[list[int]], sequences: type) -> list[StepPlan]:
    """Prompts in odd pieces beside one another; then decodes together, whose logits are wanted now and then."""
    shared = list(range(0, 10, 2))
    tables = [[*shared, *range(10, 50, 2)], list(range(79, 51, -1)), [*shared, 1, 3, 5]]
    books = sequences(None, tables)
    books.start([ids[0][:PROMPT], ids[1][:6], ids[2]])
    plans = [books.plan({0: 7}), books.plan({0: 23, 1: 5}), books.plan({0: 11, 1: 1}, full_logits=True)]
    books.fed[2] = REUSED
    plans += [books.plan({2: 5}), books.plan({2: 3}), books.plan({2: 1}, full_logits=True)]
    for index in range(NUM_GREEDY - 1):
        for s, prompt in ((0, PROMPT), (1, 6)):
            books.ids[s].append(ids[s][prompt + index])
        plans.append(books.plan({0: 1, 1: 1}, full_logits=index % 6 == 5))
    return plans


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, sequences: type) -> dict[str, Case]:
    return {name: make_case(name, seed, tmp_path_factory.mktemp("checkpoint"), sequences) for seed, name in enumerate(CASES)}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def answers(request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rank 0's answers for every checkpoint; the ranks start once for all."""
    directory = tmp_path_factory.mktemp("ranks")
    jobs = [(case.model_dir, OPTIONS, case.plans) for case in cases.values()]
    return dict(zip(cases, answers_of_ranks(directory, request.param, jobs)[0]["jobs"], strict=True))


@pytest.mark.long
def test_every_architecture_has_a_checkpoint_here(cases: dict[str, Case]) -> None:
    others = {"internlm2"}  # which transformers lacks: test_internlm2
    assert {name.split(" ")[0] for name in cases} == set(ARCHITECTURES) - others


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_logits_and_greedy_text_equal_those_of_transformers(cases: dict[str, Case], answers: dict[str, Any], name: str) -> None:
    case, answer = cases[name], answers[name]
    assert "answers" in answer, answer
    differences, checked = logit_differences(case, answer["answers"]), 0
    assert len(differences) == 2 + 1 + 2 * (NUM_GREEDY // 6 - 1)
    assert max(differences) < (3e-4 if case_has_states(name) else 1e-4)
    for plan, tokens in zip(case.plans, answer["answers"], strict=True):
        if len(plan.sampled) == 2 and not plan.full_logits:
            assert tokens[0] == case.ids[0][plan.num_context[0] + 1]
            checked += 1
    assert checked == NUM_GREEDY - NUM_GREEDY // 6


def logit_differences(case: Case, answers: list[Any]) -> list[float]:
    """The greatest difference of each row of logits that a plan asked for."""
    differences = []
    for plan, answer in zip(case.plans, answers, strict=True):
        if plan.full_logits:
            chosen = [2] if len(plan.num_new) == 1 else [0, 1]
            for row, s in zip(answer, chosen, strict=True):
                index = plan.num_context[chosen.index(s)] + plan.num_new[chosen.index(s)] - 1
                differences.append((row - case.logits[s][index]).abs().max().item())
    return differences
