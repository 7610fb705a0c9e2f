"""Programs against the layers' own functions: every architecture and format, tokens, logits and cache equal in bits."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.worker.model.architectures.checkpoints import CASES, at_its_mark
from tests.worker.model.rank_processes import Job, answers_of_ranks

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.plan import SampledToken, SampleRow, StepPlan
from ryzanstein.worker.model.program import ends
from ryzanstein.worker.model.program.ops import Call, Goal
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
GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, [], [])


@dataclass(frozen=True)
class Step:
    """A plan, and what is asked of it."""

    plan: StepPlan
    rows: list[SampleRow]
    logits: bool = False


def _schedule(rng: random.Random, runner: ModelRunner, steps: int) -> list[Step]:
    """Sequences that grow by any number of tokens, one to three in a step, of one row to more than a program takes.

    Some steps are followed by a few that give the same sequences one more token each.
    """
    found: list[Step] = []
    lengths, decodes, members = [0] * COMPANY, 0, [0]
    pages = runner.num_blocks // len(runner.extents.windows) // COMPANY
    size = runner._options.block_size
    for _ in range(steps):
        members = members if decodes else sorted(rng.sample(range(COMPANY), rng.randint(1, COMPANY)))
        new = [1 if decodes else rng.choice(NEW) for _ in members]
        decodes = decodes - 1 if decodes else rng.choice((0, 0, 0, 5))
        while sum(new) > OPTIONS["max_tokens_per_step"]:
            new[rng.randrange(len(new))] = 1
        members_new = [(s, n) for s, n in zip(members, new, strict=True) if lengths[s] + n <= pages * size]
        if not members_new:
            continue
        ids = [rng.randrange(3, 200) for _ in range(sum(n for _, n in members_new))]
        tables = [range(s * pages, (s + 1) * pages) for s, _ in members_new]
        counts, context = [n for _, n in members_new], [lengths[s] for s, _ in members_new]
        found.append(_asked(rng, runner.plans.plan(ids, counts, context, tables, list(range(len(counts))))))
        for s, n in members_new:
            lengths[s] += n
    return found


def _asked(rng: random.Random, plan: StepPlan) -> Step:
    """Asks for logits, for greedy tokens, for drawn ones among them, or for scores and hidden states besides."""
    kind, count = rng.choice(("logits", "greedy", "greedy", "drawn", "scored", "none")), len(plan.num_new)
    if kind == "none":
        return Step(replace(plan, sampled=[]), [])
    if kind == "scored":
        rows = sorted(rng.sample(range(len(plan.token_ids)), rng.randint(1, min(3, len(plan.token_ids)))))
        plan = replace(plan, scored=rows, targets=[rng.randrange(200) for _ in rows], num_top=2, pooled=rows[:1])
    drawn = kind == "drawn" or (kind == "scored" and rng.random() < 0.5)
    params = [SamplingParams(temperature=rng.choice((0.0, 0.8)), seed=s, logprobs=rng.choice((None, 2))) for s in range(count)]
    rows = [SampleRow(each if drawn else SamplingParams(temperature=0.0), 0, 3, [], []) for each in params]
    return Step(replace(plan, full_logits=drawn), rows, kind == "logits")


def _check(load: Callable[[str], ModelRunner], seed: int, threads: int, steps: int = 24) -> None:
    """Runs a schedule in Python, with inputs built for each step, in programs, and with a coin for each step."""
    torch.set_num_threads(threads)
    try:
        python, native, coin = load("python"), load("auto"), load("auto")
        python._inputs = dataclasses.replace(python._inputs, decoding=None)
        rng = random.Random(seed)
        program = coin._decoder.program
        for number, step in enumerate(_schedule(rng, python, steps)):
            coin._decoder.program = program if rng.random() < 0.5 else None
            expected, *others = (_answer(runner, step) for runner in (python, native, coin))
            for other in others:
                assert expected == other, f"step {number}"
        for runner in (native, coin):
            assert torch.equal(_memory(python), _memory(runner))
    finally:
        torch.set_num_threads(1)


def _answer(runner: ModelRunner, step: Step) -> list[SampledToken] | list[list[float]]:
    if not step.logits:
        return ModelRunner.execute(runner, step.plan, step.rows)
    logits_RV = _logits(runner, step.plan)
    assert not logits_RV.isnan().any()
    rows: list[list[float]] = logits_RV.tolist()
    return rows


def _logits(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    logits_RV = ModelRunner.hidden_logits(runner, plan)
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


RANKED = ("llama", "gemma2", "gemma3_text", "gpt2", "qwen3")
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


GOALS = {
    "llama": ("embedding", Goal.TOKENS),
    "gemma3_text": ("embedding", Goal.TOKENS),  # its vectors have a scale
    "gemma2": ("embedding", Goal.LOGITS),  # a cap
    "gpt2": ("", Goal.HIDDEN),  # learned positions, layer norms
}


@pytest.mark.parametrize("name", GOALS)
def test_the_ends_that_are_native(model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str) -> None:
    """A program begins with the embedding and ends with tokens, unless something there has no ops."""
    loaded = runner(model_dirs(name), **OPTIONS, step="auto")
    inputs, program = loaded._inputs.build(loaded.plans.plan([5], [1], [0], [[0]], [0])), loaded._decoder.program
    embedding, last = GOALS[name]
    assert [program.takes(inputs, goal) for goal in Goal] == [goal <= last for goal in Goal]
    first = program._items[0][0]
    assert isinstance(first, tuple if embedding else Call)


def test_more_logits_than_are_kept(
    model_dirs: Callable[[str], Path], runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that want more rows of logits than the program has room for end in Python."""
    python = runner(model_dirs("llama"), **OPTIONS, step="python")
    monkeypatch.setattr(ends, "MOST_LOGITS", 2 * python.vocab_size)
    native = runner(model_dirs("llama"), **OPTIONS, step="auto")
    monkeypatch.setattr(ends, "MOST_LOGITS", python.vocab_size - 1)
    none = runner(model_dirs("llama"), **OPTIONS, step="auto")
    for count, goals in ((2, 3), (3, 1)):
        plan = python.plans.plan([5, 6, 7][:count], [1] * count, [0] * count, [[0], [1], [2]][:count], list(range(count)))
        assert sum(native._decoder.program.takes(native._inputs.build(plan), goal) for goal in Goal) == goals
        assert sum(none._decoder.program.takes(none._inputs.build(plan), goal) for goal in Goal) == 1
        for other in (native, none):
            assert torch.equal(python.hidden_logits(plan), other.hidden_logits(plan))
            assert python.execute(plan, [GREEDY] * count) == other.execute(plan, [GREEDY] * count)


def test_logits_are_not_overwritten(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> None:
    native = runner(model_dirs("llama"), **OPTIONS, step="auto")
    found = [native.hidden_logits(native.plans.plan([token], [1], [0], [[0]], [0])) for token in (5, 6)]
    assert not torch.equal(*found)


@pytest.mark.distributed
def test_two_ranks(model_dirs: Callable[[str], Path], tmp_path: Path) -> None:
    """Both ends are split over the vocabulary: rows that another rank has, logits that are gathered, a winner of each."""
    rng, jobs = random.Random(0), list[Job]()
    plans = [StepPlan(1, rng.choices(range(3, 90), k=9), [9], [0], [list(range(8))], [0])]
    for context in range(9, 21):
        table, ids = list(range(8)), [rng.randrange(3, 90)]
        plans.append(StepPlan(1, ids, [1], [context], [table], [0], full_logits=context % 2 > 0))
    for name in RANKED:
        options = {**OPTIONS, "num_threads": 1}
        jobs += [(model_dirs(name), {**options, "step": step}, plans) for step in ("python", "auto")]
    found = iter(answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"])
    for name in RANKED:
        python, native = next(found)["answers"], next(found)["answers"]
        for expected, answer in zip(python, native, strict=True):
            assert torch.equal(expected, answer) if isinstance(expected, torch.Tensor) else expected == answer, name
