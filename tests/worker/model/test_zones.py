"""Compressed blocks and hot pages in a whole model: the same bits in any company, near what full precision gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.lone_engine import check_company
from tests.worker.model.rank_processes import answers_of_ranks
from tests.worker.model.schedules import Schedules, differing, rows_of

from ryzanstein.worker.refusal import ModelRefused

pytestmark = pytest.mark.long

COMPRESSIONS = ("lazy-fp8", "eager-fp8", "lazy-int8", "lazy-fp8-values", "lazy-int8-channels")
CASES = [
    *(("llama", compression) for compression in COMPRESSIONS),
    ("gemma3_text", "lazy-fp8"),
    ("gemma3_text", "eager-fp8"),
    ("gemma2", "lazy-fp8"),
    ("bloom", "lazy-fp8"),
    ("qwen2_moe", "lazy-fp8"),
]
SCHEDULES = Schedules(block_size=16, num_blocks=32, shared=64)
OPTIONS = {**SCHEDULES.options, "kernels": "native"}


@pytest.mark.parametrize(("name", "compression"), CASES)
def test_a_row_has_the_same_bits_in_any_company(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, compression: str
) -> None:
    loaded = runner(model_dirs(name), **OPTIONS, kv_compression=compression)
    assert loaded.kv_compression == compression
    assert loaded.hot_pages >= 32  # the plans of these tests put page n into hot page n
    SCHEDULES.check(loaded, num_schedules=2)


@pytest.mark.distributed
def test_two_ranks_compress_their_own_heads(model_dirs: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a word between them: sums over ranks have their own order, which is always the same."""
    ids = SCHEDULES.sequence_ids()
    parts = [SCHEDULES.alone(ids), SCHEDULES.company(ids, random.Random(1))]
    plans = [plan for steps in parts for plan, _ in steps]
    cases = [("llama", "lazy-fp8"), ("gemma3_text", "lazy-fp8"), ("llama", "lazy-fp8-values"), ("llama", "none")]
    jobs = [(model_dirs(name), {**OPTIONS, "kv_compression": kind, "num_threads": 1}, plans) for name, kind in cases]
    found = []
    for case, job in zip(cases, answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"], strict=True):
        answers = iter(job["answers"])
        expected, together = (rows_of(steps, [next(answers) for _ in steps]) for steps in parts)
        assert not differing(expected, together), case
        found.append(torch.stack(list(expected.values())))
    assert 0 < (found[0] - found[3]).abs().mean() < 0.1 * found[3].std()


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_answers_are_near_those_of_full_precision_and_the_same_while_all_is_hot(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str
) -> None:
    whole = SCHEDULES.logits(runner(model_dirs(name), **OPTIONS))
    hot = SCHEDULES.logits(runner(model_dirs(name), **OPTIONS, kv_compression="lazy-fp8", kv_hot_tokens=160))
    assert torch.equal(whole, hot)
    spread = whole.std()
    for compression, bound in (("lazy-fp8", 0.1), ("eager-fp8", 0.1), ("lazy-int8", 0.05), ("lazy-fp8-values", 0.1)):
        difference = (SCHEDULES.logits(runner(model_dirs(name), **OPTIONS, kv_compression=compression)) - whole).abs()
        assert 0 < difference.mean() < bound * spread, compression


@pytest.mark.parametrize(("name", "compression"), [("llama", "none"), ("gemma3_text", "none"), *CASES[:8]])
def test_an_engine_gives_each_request_its_own_bits_with_reuse_chunks_and_company(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, compression: str
) -> None:
    options = {**OPTIONS, "max_tokens_per_step": 48, "kv_compression": compression, "num_blocks": 40}
    check_company(runner(model_dirs(name), **options))


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
