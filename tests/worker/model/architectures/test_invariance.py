"""A row's logits have the same bits in any company: random schedules of every architecture against one token at a time, alone.

A schedule decides which sequences a step has, how many tokens of each (a prompt cut anywhere, a whole one, an answer resumed at
any index), in which blocks they lie, which begin with blocks of another, and how many threads compute.
"""

import importlib.util
import pickle
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import StepPlan

_SPEC = importlib.util.spec_from_file_location("architecture_cases", Path(__file__).with_name("test_architectures.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
architectures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(architectures)

LENGTHS = (150, 97, 100)
SHARED = 68  # tokens that the third sequence has in common with the first: whole blocks, and more than one chunk of keys
BLOCK_SIZE = 4
NUM_BLOCKS = 120
OPTIONS = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_tokens_per_step": 400, "max_sequences": 4}
FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "fp16 weights": {"quantization": "fp16"},
    "int8 weights": {"quantization": "int8"},
    "float16 cache": {"kv_dtype": "float16"},
}
IN_EVERY_FORMAT = ("llama", "gemma2", "gpt2", "bloom", "qwen2_moe", "deepseek_v3")
NUM_SCHEDULES = 3

Rows = dict[tuple[int, int], Tensor]
"""Logits by sequence and position."""


def sequence_ids(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    ids = [[rng.randrange(3, 251) for _ in range(length)] for length in LENGTHS]
    ids[2][:SHARED] = ids[0][:SHARED]
    return ids


def tables(rng: random.Random, shares: bool) -> list[list[int]]:
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    needed = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    found = [[blocks.pop() for _ in range(count)] for count in needed]
    if shares:
        found[2][: SHARED // BLOCK_SIZE] = found[0][: SHARED // BLOCK_SIZE]
    return found


Steps = list[tuple[StepPlan, list[tuple[int, int]]]]
"""Plans, and which sequence's position each of their rows is."""


def alone(ids: list[list[int]]) -> Steps:
    """Every position as a step of its own."""
    own = tables(random.Random(0), shares=False)
    return [
        (StepPlan(1, [token], [1], [position], [own[s]], [0], True), [(s, position)])
        for s, row in enumerate(ids)
        for position, token in enumerate(row)
    ]


def chunk(rng: random.Random, left: int) -> int:
    most = left if rng.random() < 0.1 else 2
    return min(left, rng.choice([1, 1, 1, 1, rng.randint(1, 6), rng.randint(1, 70), most]))


def company(ids: list[list[int]], rng: random.Random) -> Steps:
    """One random schedule."""
    shares = rng.random() < 0.5
    own, fed = tables(rng, shares), [0, 0, 0]
    steps: Steps = []
    while any(fed[s] < LENGTHS[s] for s in range(3)):
        open_s = [s for s in range(3) if fed[s] < LENGTHS[s] and not (s == 2 and shares and fed[0] < SHARED)]
        if shares and 2 in open_s and fed[2] == 0:
            fed[2] = SHARED
        chosen = rng.sample(open_s, rng.randint(1, len(open_s)))
        num_new = [chunk(rng, LENGTHS[s] - fed[s]) for s in chosen]
        tokens = [token for s, count in zip(chosen, num_new, strict=True) for token in ids[s][fed[s] : fed[s] + count]]
        context, step_tables = [fed[s] for s in chosen], [own[s] for s in chosen]
        plan = StepPlan(1, tokens, num_new, context, step_tables, list(range(len(chosen))), True)
        for s, count in zip(chosen, num_new, strict=True):
            fed[s] += count
        steps.append((plan, [(s, fed[s] - 1) for s in chosen]))
    return steps


def rows_of(steps: Steps, answers: Iterable[Tensor]) -> Rows:
    return {key: row for (_, keys), logits in zip(steps, answers, strict=True) for key, row in zip(keys, logits, strict=True)}


def run(runner: Any, steps: Steps, num_threads: int = 1) -> Rows:
    torch.set_num_threads(num_threads)
    try:
        return rows_of(steps, [runner.hidden_logits(plan) for plan, _ in steps])
    finally:
        torch.set_num_threads(1)


def differing(expected: Rows, rows: Rows) -> list[tuple[int, int, float]]:
    """Sequence, position, and the greatest difference, of rows whose bits are not the same."""
    return [
        (s, position, (logits - expected[s, position]).abs().max().item())
        for (s, position), logits in rows.items()
        if not torch.equal(logits.view(torch.int32), expected[s, position].view(torch.int32))
    ]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a case of test_architectures, written once."""
    written: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp("checkpoint")
            architectures.write(name, len(written), written[name])
        return written[name]

    return find


def check(runner: Any, num_schedules: int = NUM_SCHEDULES) -> None:
    ids = sequence_ids(7)
    runner.forgets = False
    expected = run(runner, alone(ids))
    runner.forgets = True
    assert all(row.isfinite().all() for row in expected.values())
    for seed in range(num_schedules):
        rows = run(runner, company(ids, random.Random(seed)), num_threads=1 if seed % 2 else 2 + seed // 2 % 2)
        wrong = differing(expected, rows)
        assert not wrong, f"schedule {seed}: {len(wrong)} of {len(rows)} rows, the first {wrong[0]}"


@pytest.mark.parametrize("name", architectures.CASES)
def test_every_architecture(model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str) -> None:
    check(runner(model_dirs(name), **OPTIONS, kernels="native"))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "float32"])
@pytest.mark.parametrize("name", IN_EVERY_FORMAT)
def test_every_format(model_dirs: Callable[[str], Path], runner: Callable[..., Any], name: str, kind: str) -> None:
    check(runner(model_dirs(name), **OPTIONS, **FORMATS[kind], kernels="native"))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_tied_head_that_is_too_large_to_keep_twice(
    checkpoint: Callable[..., Path], runner: Callable[..., Any], kind: str
) -> None:
    model_dir = checkpoint(vocab_size=33_001, tie_word_embeddings=True)
    check(runner(model_dir, **OPTIONS, **FORMATS[kind], kernels="native"), num_schedules=2)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 64), (3, 1, 100), (2, 1, 128)], ids=str)
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
    check(runner(model_dir, **OPTIONS, **FORMATS[kind], kernels="native"), num_schedules=3)


@pytest.mark.distributed
def test_two_ranks(model_dirs: Callable[[str], Path], tmp_path: Path) -> None:
    """Each has half of the heads, columns and experts; sums over ranks have their own order, which is always the same."""
    ids, names = sequence_ids(7), ("llama", "qwen2_moe", "deepseek_v3", "bloom", "olmo2")
    parts = [alone(ids), *(company(ids, random.Random(seed)) for seed in range(2))]
    plans = [plan for steps in parts for plan, _ in steps]
    options = {**OPTIONS, "kernels": "native", "num_threads": 1}
    (tmp_path / "jobs").write_bytes(pickle.dumps([(model_dirs(name), options, plans) for name in names]))
    architectures._run_ranks(tmp_path, 2)
    for name, job in zip(names, torch.load(tmp_path / "out0")["jobs"], strict=True):
        answers = iter(job["answers"])
        expected, *others = (rows_of(steps, [next(answers) for _ in steps]) for steps in parts)
        for rows in others:
            assert not differing(expected, rows), name
