"""Sparse attention in a whole model: near a reference that masks densely, the same bits in any company, less memory."""

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

from ryzanstein.worker.model.sparse_layers import sparsified
from ryzanstein.worker.refusal import ModelRefused

SCHEDULES = Schedules(block_size=16, num_blocks=32, shared=64)
OPTIONS = {**SCHEDULES.options, "kernels": "native"}
SINKS, STRIDED, QUEST = "window=20,sinks=16", "window=24,stride=3", "window=16,sinks=16,quest=2"
CASES = [
    *(("llama", rule) for rule in (SINKS, STRIDED, QUEST, f"{SINKS},layers=1")),
    ("gemma3_text", SINKS),
    ("gemma3_text", QUEST),
]


@pytest.mark.parametrize(("name", "sparse"), CASES)
def test_a_row_has_the_same_bits_in_any_company(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, sparse: str
) -> None:
    loaded = runner(model_dirs(name), **OPTIONS, sparse_attention=sparse)
    assert loaded.sparse_attention == sparse
    SCHEDULES.check(loaded, num_schedules=2)
    dense = SCHEDULES.logits(runner(model_dirs(name), **OPTIONS))
    assert not torch.equal(dense, SCHEDULES.logits(loaded)), "nothing is left out: the test shows little"


def test_pages_of_other_layers_with_the_rule_are_foreign(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    rules = ("", SINKS, f"{SINKS},layers=0", f"{SINKS},layers=1", QUEST, f"{QUEST},layers=0", f"{QUEST},layers=1")
    formats = {runner(model_dirs("llama"), **OPTIONS, sparse_attention=rule).page_format for rule in rules}
    assert len(formats) == len(rules)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("sparse", ["window=4096,sinks=16", "window=16,quest=20", "window=16,stride=2,sinks=4000"])
def test_what_leaves_nothing_out_is_dense(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, sparse: str
) -> None:
    dense = SCHEDULES.logits(runner(model_dirs(name), **OPTIONS))
    loaded = SCHEDULES.logits(runner(model_dirs(name), **OPTIONS, sparse_attention=sparse))
    torch.testing.assert_close(dense, loaded, rtol=1e-4, atol=1e-4)
    assert torch.equal(dense, loaded) or "stride" in sparse


@pytest.mark.parametrize(("name", "sparse"), CASES)
def test_an_engine_gives_each_request_its_own_bits_with_reuse_chunks_and_company(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, sparse: str
) -> None:
    options = {**OPTIONS, "max_tokens_per_step": 48, "sparse_attention": sparse, "num_blocks": 40}
    check_company(runner(model_dirs(name), **options))


def test_layers_with_heads_of_their_own_follow_no_rule(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    with pytest.raises(ModelRefused, match="layers have heads of their own"):
        runner(model_dirs("gemma4_text"), **OPTIONS, sparse_attention=SINKS)


@pytest.mark.distributed
@pytest.mark.long
def test_two_ranks_choose_the_same_pages(model_dirs: Callable[[str], Path], tmp_path: Path) -> None:
    """Each for its heads, without a word between them: the answers are those of one rank, up to the order of sums."""
    ids = SCHEDULES.sequence_ids()
    parts = [SCHEDULES.alone(ids), SCHEDULES.company(ids, random.Random(1))]
    plans = [plan for steps in parts for plan, _ in steps]
    cases = [("llama", SINKS), ("llama", QUEST), ("gemma3_text", QUEST), ("llama", STRIDED)]
    jobs = [(model_dirs(name), {**OPTIONS, "sparse_attention": rule, "num_threads": 1}, plans) for name, rule in cases]
    found = {}
    for num_ranks in (1, 2):
        for case, job in zip(cases, answers_of_ranks(tmp_path, num_ranks, jobs)[0]["jobs"], strict=True):
            answers = iter(job["answers"])
            expected, together = (rows_of(steps, [next(answers) for _ in steps]) for steps in parts)
            assert not differing(expected, together), case
            found[num_ranks, case] = torch.stack(list(expected.values()))
    for case in cases:
        torch.testing.assert_close(found[1, case], found[2, case], rtol=1e-3, atol=1e-3)


def test_what_left_the_window_takes_no_memory(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    """A pool that holds a dense sequence of 160 tokens holds a sparse one of any length."""
    options = {**OPTIONS, "num_blocks": 10, "max_tokens_per_step": 48}
    dense, sparse = (runner(model_dirs("llama"), **options, sparse_attention=rule) for rule in ("", SINKS))
    assert dense.extents.tokens_in(dense.num_blocks) == 160
    assert sparse.extents.tokens_in(sparse.num_blocks) > 1 << 30
    strided = runner(model_dirs("llama"), **options, sparse_attention="window=16,stride=4")
    assert 160 < strided.extents.tokens_in(strided.num_blocks) < 1000


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama", {"sparse_attention": "window=32,layers=7-9"}, "there is no layer"),
        ("gemma3_text", {"sparse_attention": "window=32,layers=0"}, "layer 0 has a window of its own"),
        ("deepseek_v3", {}, "latents"),
        ("bloom", {}, "linear biases"),
        ("llama", {"kv_compression": "lazy-fp8"}, "does not combine with kv_compression lazy-fp8"),
        ("llama", {"kernels": "torch"}, "needs our own kernels"),
    ],
)
def test_what_it_does_not_combine_with_is_refused_by_name(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelRefused, match=message):
        runner(model_dirs(name), **{**OPTIONS, "sparse_attention": SINKS, **changed})


def test_a_decoder_without_the_setting_stays_as_it_is() -> None:
    spec: Any = object()
    assert sparsified(spec, "") is spec
