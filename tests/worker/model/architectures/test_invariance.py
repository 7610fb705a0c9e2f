"""A row's logits have the same bits in any company: schedules of every architecture against one token at a time, alone."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.architectures.checkpoints import CASES, at_its_mark
from tests.worker.model.rank_processes import answers_of_ranks
from tests.worker.model.schedules import Schedules, differing, rows_of

SCHEDULES = Schedules()
OPTIONS = {**SCHEDULES.options, "kernels": "native"}
FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "fp16 weights": {"quantization": "fp16"},
    "int8 weights": {"quantization": "int8"},
    "float16 cache": {"kv_dtype": "float16"},
}
IN_EVERY_FORMAT = (
    *("llama", "gemma2", "gpt2", "bloom", "qwen2_moe", "deepseek_v3", "lfm2 several planes", "qwen3_5_text"),
    *("granitemoehybrid states", "gemma4_text", "gemma4_text keys are values"),
)


@pytest.mark.parametrize("name", at_its_mark(CASES))
def test_every_architecture(model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str) -> None:
    SCHEDULES.check(runner(model_dirs(name), **OPTIONS))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "float32"])
@pytest.mark.parametrize("name", IN_EVERY_FORMAT)
@pytest.mark.long
def test_every_format(model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, kind: str) -> None:
    SCHEDULES.check(runner(model_dirs(name), **OPTIONS, **FORMATS[kind]))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_tied_head_that_is_too_large_to_keep_twice(
    checkpoint: Callable[..., Path], runner: Callable[..., Any], kind: str
) -> None:
    model_dir = checkpoint(vocab_size=33_001, tie_word_embeddings=True)
    SCHEDULES.check(runner(model_dir, **OPTIONS, **FORMATS[kind]), num_schedules=2)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 64), (3, 1, 100), (2, 1, 128)], ids=str)
@pytest.mark.long
def test_usual_widths(
    checkpoint: Callable[..., Path], runner: Callable[..., Any], heads: tuple[int, int, int], kind: str
) -> None:
    """Wide enough for several tiles, panels and threads."""
    num_heads, num_kv_heads, head_dim = heads
    model_dir = checkpoint(
        hidden_size=num_heads * head_dim,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=331,
        vocab_size=1003,
    )
    SCHEDULES.check(runner(model_dir, **OPTIONS, **FORMATS[kind]), num_schedules=3)


@pytest.mark.distributed
@pytest.mark.long
def test_two_ranks(model_dirs: Callable[[str], Path], tmp_path: Path) -> None:
    """Each has half of the heads, columns and experts; sums over ranks have their own order, which is always the same."""
    ids = SCHEDULES.sequence_ids()
    names = ("llama", "qwen2_moe", "deepseek_v3", "bloom", "olmo2", "lfm2", "qwen3_5_text", "granitemoehybrid states")
    parts = [SCHEDULES.alone(ids), *(SCHEDULES.company(ids, random.Random(seed)) for seed in range(2))]
    plans = [plan for steps in parts for plan, _ in steps]
    jobs = [(model_dirs(name), {**OPTIONS, "num_threads": 1}, plans) for name in names]
    for name, job in zip(names, answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"], strict=True):
        answers = iter(job["answers"])
        expected, *others = (rows_of(steps, [next(answers) for _ in steps]) for steps in parts)
        for rows in others:
            assert not differing(expected, rows), name
