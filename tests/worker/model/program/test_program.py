"""Programs against the layers' own functions: every architecture and format, logits and cache equal in bits."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.architectures.checkpoints import CASES, at_its_mark

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.runner import ModelRunner

OPTIONS = {
    "num_blocks": 90,
    "num_states": 90,
    "block_size": 4,
    "max_tokens_per_step": 80,
    "max_sequences": 4,
    "kernels": "native",
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp16 weights": {"quantization": "fp16"},
    "int8 weights": {"quantization": "int8"},
    "float16 cache": {"kv_dtype": "float16"},
    "cold pages": {"block_size": 16, "num_blocks": 40, "kv_compression": "lazy-fp8"},
    "sparse": {"sparse_attention": "window=16,sinks=4"},
}
NEW = (1, 1, 1, 2, 3, 8, 17, 33, 64, 65)
COMPANY = 3


def _schedule(rng: random.Random, runner: ModelRunner, steps: int) -> list[StepPlan]:
    """Sequences that grow by any number of tokens, one to three in a step, of one row to more than a program takes."""
    plans, lengths = [], [0] * COMPANY
    pages = runner.num_blocks // len(runner.extents.windows) // COMPANY
    size = runner._options.block_size
    for _ in range(steps):
        members = sorted(rng.sample(range(COMPANY), rng.randint(1, COMPANY)))
        new = [rng.choice(NEW) for _ in members]
        while sum(new) > OPTIONS["max_tokens_per_step"]:
            new[rng.randrange(len(new))] = 1
        members_new = [(s, n) for s, n in zip(members, new, strict=True) if lengths[s] + n <= pages * size]
        if not members_new:
            continue
        ids = [rng.randrange(3, 200) for _ in range(sum(n for _, n in members_new))]
        tables = [range(s * pages, (s + 1) * pages) for s, _ in members_new]
        counts, context = [n for _, n in members_new], [lengths[s] for s, _ in members_new]
        plans.append(runner.plans.plan(ids, counts, context, tables, list(range(len(counts)))))
        for s, n in members_new:
            lengths[s] += n
    return plans


def _check(load: Callable[[str], ModelRunner], seed: int, threads: int, steps: int = 14) -> None:
    """Runs a schedule in Python, in programs, and with a coin for each step."""
    torch.set_num_threads(threads)
    try:
        python, native, coin = load("python"), load("auto"), load("auto")
        rng = random.Random(seed)
        program = coin._decoder.program
        for number, plan in enumerate(_schedule(rng, python, steps)):
            coin._decoder.program = program if rng.random() < 0.5 else None
            expected, *others = (_logits(runner, plan) for runner in (python, native, coin))
            for other in others:
                assert torch.equal(expected, other), f"step {number}"
        for runner in (native, coin):
            assert torch.equal(_memory(python), _memory(runner))
    finally:
        torch.set_num_threads(1)


def _logits(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    logits_RV = runner.hidden_logits(plan)
    assert logits_RV is not None
    return logits_RV


def _memory(runner: ModelRunner) -> torch.Tensor:
    cache = runner._cache
    pages = getattr(cache, "hot", cache)._pages_PNC
    return pages.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", at_its_mark(CASES))
def test_every_architecture(model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str) -> None:
    folder, index = model_dirs(name), list(CASES).index(name)
    _check(lambda step: runner(folder, **OPTIONS, step=step), index, 1 + index % 5)


NAMES = ("llama", "gemma2", "qwen3_moe", "gpt2", "bloom")
UNFIT = {("bloom", "sparse"), ("bloom", "cold pages")}  # biases of positions


@pytest.mark.parametrize(("name", "kind"), sorted({(name, kind) for name in NAMES for kind in FORMATS} - UNFIT))
def test_every_format(model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, kind: str) -> None:
    folder = model_dirs(name)
    _check(lambda step: runner(folder, **OPTIONS | FORMATS[kind], step=step), 7, 2)


def test_what_is_native(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    """All layers of a dense model have ops. Experts have none: they are called in between, and the reason is reported."""
    dense, experts, python = (
        runner(model_dirs(name), **OPTIONS, step=step)
        for name, step in (("llama", "auto"), ("mixtral", "auto"), ("llama", "python"))
    )
    assert (dense.native_layers, dense.without_native) == (1.0, "")
    assert (experts.native_layers, experts.without_native) == (0.5, "Mixture has no ops")
    assert (python.native_layers, python.without_native) == (0.0, "chosen")


def test_memory_grows_with_what_a_step_needs(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    """A program that has too little memory computes nothing, and the same step with more of it computes the same."""
    options = OPTIONS | {"num_blocks": 400, "max_tokens_per_step": 300}
    python, native = (runner(model_dirs("llama"), **options, step=step) for step in ("python", "auto"))
    program = native._decoder.program
    program._grow(1)
    prompt = python.plans.plan([5] * 300, [300], [0], [range(80)], [0])
    decode = python.plans.plan([7, 8], [1, 1], [300, 0], [range(80), range(80, 160)], [0, 1])
    for plan in (prompt, decode):
        assert torch.equal(python.hidden_logits(plan), native.hidden_logits(plan))
    assert program._program.memory_bytes >= program._program.needed_bytes > 1


def test_a_profile_shows_operators(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    native = runner(model_dirs("llama"), **OPTIONS, step="auto")
    inputs = native._inputs.build(native.plans.plan([5], [1], [0], [[0]], [0]))
    assert native._decoder.program.takes(inputs)
    with torch.autograd.profiler.profile():
        assert not native._decoder.program.takes(inputs)
