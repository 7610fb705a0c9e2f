"""Compressed blocks and hot pages in a whole model: the same bits in any company, near what full precision gives."""

from __future__ import annotations

import importlib.util
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ryzanstein.generation.sampling import SamplingParams
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.plan import PageMove, Rearrangement, SampledToken, SampleRow, StepPlan
from ryzanstein.worker.engine.settings import EngineSettings
from ryzanstein.worker.model.refusal import ModelRefused
from ryzanstein.worker.model.runner import ModelRunner

_SPEC = importlib.util.spec_from_file_location("invariance", Path(__file__).parent / "architectures" / "test_invariance.py")
assert _SPEC is not None
assert _SPEC.loader is not None
invariance = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(invariance)
invariance.BLOCK_SIZE, invariance.SHARED, invariance.NUM_BLOCKS = 16, 64, 32

COMPRESSIONS = ("lazy-fp8", "eager-fp8", "lazy-int8", "lazy-fp8-values", "lazy-int8-channels")
CASES = [
    *(("llama", compression) for compression in COMPRESSIONS),
    ("gemma3_text", "lazy-fp8"),
    ("gemma3_text", "eager-fp8"),
    ("gemma2", "lazy-fp8"),
    ("bloom", "lazy-fp8"),
    ("qwen2_moe", "lazy-fp8"),
]
OPTIONS = {**invariance.OPTIONS, "block_size": 16, "num_blocks": 32, "kernels": "native"}
model_dirs = invariance.model_dirs


@pytest.mark.parametrize(("name", "compression"), CASES)
def test_a_row_has_the_same_bits_in_any_company(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, compression: str
) -> None:
    loaded = runner(model_dirs(name), **OPTIONS, kv_compression=compression)
    assert loaded.kv_compression == compression
    assert loaded.hot_pages >= 32  # the plans of these tests put page n into hot page n
    invariance.check(loaded, num_schedules=2)


@pytest.mark.distributed
def test_two_ranks_compress_their_own_heads(model_dirs: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a word between them: sums over ranks have their own order, which is always the same."""
    ids = invariance.sequence_ids(7)
    parts = [invariance.alone(ids), invariance.company(ids, random.Random(1))]
    plans = [plan for steps in parts for plan, _ in steps]
    cases = [("llama", "lazy-fp8"), ("gemma3_text", "lazy-fp8"), ("llama", "lazy-fp8-values"), ("llama", "none")]
    jobs = [(model_dirs(name), {**OPTIONS, "kv_compression": kind, "num_threads": 1}, plans) for name, kind in cases]
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs))
    invariance.architectures._run_ranks(tmp_path, 2)
    found = []
    for case, job in zip(cases, torch.load(tmp_path / "out0")["jobs"], strict=True):
        answers = iter(job["answers"])
        expected, together = (invariance.rows_of(steps, [next(answers) for _ in steps]) for steps in parts)
        assert not invariance.differing(expected, together), case
        found.append(torch.stack(list(expected.values())))
    assert 0 < (found[0] - found[3]).abs().mean() < 0.1 * found[3].std()


def run(loaded: Any) -> torch.Tensor:
    ids = invariance.sequence_ids(7)
    return torch.stack(list(invariance.run(loaded, invariance.alone(ids)).values()))


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_answers_are_near_those_of_full_precision_and_the_same_while_all_is_hot(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str
) -> None:
    whole = run(runner(model_dirs(name), **OPTIONS))
    hot = run(runner(model_dirs(name), **OPTIONS, kv_compression="lazy-fp8", kv_hot_tokens=160))
    assert torch.equal(whole, hot)
    spread = whole.std()
    for compression, bound in (("lazy-fp8", 0.1), ("eager-fp8", 0.1), ("lazy-int8", 0.05), ("lazy-fp8-values", 0.1)):
        difference = (run(runner(model_dirs(name), **OPTIONS, kv_compression=compression)) - whole).abs()
        assert 0 < difference.mean() < bound * spread, compression


class Ranks:
    """One rank without a process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_fed = 0

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> list[SampledToken]:
        self.num_fed += len(plan.token_ids)
        return ModelRunner.execute(self._runner, plan, rows)

    def rearrange(self, change: Rearrangement) -> None:
        self._runner.rearrange(change)

    def move_pages(self, move: PageMove) -> None:
        raise NotImplementedError


def serve(loaded: Any, budget: int, messages: Sequence[SubmitGroup], rng: random.Random) -> tuple[dict[int, Any], int]:
    """The tokens and logprobs of groups that arrive at random times, and how many tokens were computed."""
    ranks = Ranks(loaded)
    hot_tokens = loaded.extents.hot_tokens or 0
    settings = EngineSettings(
        loaded.num_blocks,
        16,
        4,
        budget,
        windows=loaded.extents.windows,
        hot_tokens=hot_tokens,
        hot_pages=loaded.hot_pages,
        lasting=loaded.extents.lasting,
    )
    engine, found = Engine(settings, ranks), {message.group: [] for message in messages}
    waiting = list(messages)
    for _ in range(2000):
        if waiting and (rng.random() < 0.3 or not engine.has_work):
            engine.submit(waiting.pop(0))
        if not waiting and not engine.has_work:
            break
        events = engine.step()
        assert not events.failed
        for row, (group, token) in enumerate(zip(events.groups, events.token_ids, strict=True)):
            found[group].append((token, events.logprobs[row][0]))
    return found, ranks.num_fed


def conversation(rng: random.Random, group: int, prompt: list[int]) -> SubmitGroup:
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    return SubmitGroup(group, prompt, sampling, rng.randint(1, 40), [], [[]], [False])


@pytest.mark.parametrize(("name", "compression"), [("llama", "none"), ("gemma3_text", "none"), *CASES[:8]])
def test_an_engine_gives_each_request_its_own_bits_with_reuse_chunks_and_company(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, compression: str
) -> None:
    """Each request alone in a fresh engine, and all of them together in one: with prefixes of others and pages that left."""
    options = {**OPTIONS, "max_tokens_per_step": 48, "kv_compression": compression, "num_blocks": 40}
    loaded = runner(model_dirs(name), **options)
    rng = random.Random(3)
    texts = [[rng.randrange(3, 251) for _ in range(170)] for _ in range(2)]
    prompts = [
        rng.choice(texts)[: rng.randint(20, 170)] + [rng.randrange(3, 251) for _ in range(rng.randint(0, 20))]
        for _ in range(10)
    ]
    messages = [conversation(rng, group, prompt) for group, prompt in enumerate(prompts)]
    alone = [serve(loaded, 7 + 4 * group, [message], rng) for group, message in enumerate(messages)]
    together, num_fed = serve(loaded, 48, messages, rng)
    assert together == {group: answers[group] for group, (answers, _) in enumerate(alone)}
    assert num_fed < 0.9 * sum(fed for _, fed in alone), "nothing was reused: the test shows little"


def test_a_budget_covers_blocks_and_hot_pages(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    options = {**OPTIONS, "num_blocks": None, "kv_bytes": 2**21}
    plain = runner(model_dirs("llama"), **options)
    loaded = runner(model_dirs("llama"), **options, kv_compression="lazy-fp8")
    assert loaded.kv_bytes <= 2**21 < loaded.kv_bytes + loaded.block_bytes
    assert loaded.block_bytes < 0.5 * plain.block_bytes  # heads of so few numbers are padded
    with pytest.raises(ModelRefused, match=r"beside \d+ for hot pages"):
        runner(model_dirs("llama"), **{**options, "kv_bytes": 2**17}, kv_compression="lazy-fp8")


def test_where_our_kernels_do_not_run_nothing_is_compressed_and_it_is_said(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any]
) -> None:
    loaded = runner(model_dirs("llama"), **{**OPTIONS, "kernels": "torch"}, kv_compression="lazy-fp8")
    assert (loaded.kv_compression, loaded.hot_pages) == ("none", 0)
    assert "our own kernels" in loaded.without_compression
    latents = runner(model_dirs("deepseek_v3"), **OPTIONS, kv_compression="lazy-fp8")
    assert "latents" in latents.without_compression
    with pytest.raises(ModelRefused, match="needs a block_size of 16"):
        runner(model_dirs("llama"), **{**OPTIONS, "block_size": 4}, kv_compression="lazy-fp8")
