"""Programs that have run for long, beside others, whose pages were moved and whose steps failed: still the bits of Python."""

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.worker.model.program.conftest import Groups
from tests.worker.model.program.test_program import OPTIONS, _logits, _memory

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.collectives import PeerGaveUp
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import OutOfMemory, Rearrangement, SampledToken, SampleRow, StepPlan
from ryzanstein.worker.model.program.running import Program
from ryzanstein.worker.model.runner import ModelRunner

SEQUENCES = 66
PAGES = 4  # of each sequence
SIZES = (1, 64, 1, 65, 2, 64, 66, 1, 33)
MANY = {"num_blocks": SEQUENCES * PAGES, "block_size": 4, "max_tokens_per_step": 80, "max_sequences": 80, "kernels": "native"}
ADDRESSES = ("weight", "scale", "bias", "norm", "query_norm", "key_norm", "pages", "cold", "sinks")
BOARD_PLACE = 21  # of meeting.h
GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())


def _program(runner: ModelRunner) -> Program:
    program = runner._decoder.program
    assert program is not None
    return program


def _check_addresses(runner: ModelRunner) -> None:
    """Checks that ops have the addresses of what the model has now: those that a program of it would get."""
    program, kernels = _program(runner), runner._kernels
    kept = {tensor.data_ptr() for tensor in program._ops.kept}
    assert kernels is not None
    runner._decoder.compile(kernels, runner._cache, program._ops.hidden_size)
    fresh = _program(runner)
    runner._decoder.program = program
    assert bytes(program._structs) == bytes(fresh._structs)
    for op in program._structs:
        assert {getattr(op, name) for name in ADDRESSES} - {None} <= kept
    assert program._program.arena == program._arena.data_ptr()
    begin = program._memory.data_ptr()
    assert begin <= program._program.memory
    assert program._program.memory + program._program.memory_bytes <= begin + program._memory.nbytes


class Batches:
    """Decode steps of any number of sequences, which begin anew when their pages are full."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self._plans, self._rng = runner.plans, random.Random(seed)
        self._lengths = [0] * SEQUENCES

    def plan(self, size: int) -> StepPlan:
        members = sorted(self._rng.sample(range(SEQUENCES), size))
        context = [self._lengths[s] for s in members]
        tables = [range(s * PAGES, (s + 1) * PAGES) for s in members]
        ids = [self._rng.randrange(3, 200) for _ in members]
        for s in members:
            self._lengths[s] = (self._lengths[s] + 1) % (PAGES * 4)
        return self._plans.plan(ids, [1] * size, context, tables, [0, size - 1])


def test_thousands_of_steps(model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner]) -> None:
    """Batches grow and shrink across what a program takes; a coin decides for each step."""
    python, coin = (runner(model_dirs("llama"), **MANY, step=step) for step in ("python", "auto"))
    batches, rng, program = Batches(python, 1), random.Random(2), _program(coin)
    for number in range(2_000):
        coin._decoder.program = program if rng.random() < 0.8 else None
        plan = batches.plan(SIZES[number % len(SIZES)])
        assert torch.equal(_logits(python, plan), _logits(coin, plan)), number
    coin._decoder.program = program
    assert torch.equal(_memory(python), _memory(coin))
    _check_addresses(coin)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_pages_that_were_moved_lent_and_released(
    model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner], name: str
) -> None:
    """After each step a page goes elsewhere, and the memory of those behind the last one in use is released."""
    lending = OPTIONS | {"num_blocks": 40, "lends_blocks": True, "borrow_bytes": 2**20}
    python, native = (runner(model_dirs(name), **lending, step=step) for step in ("python", "auto"))
    assert python.max_blocks > 80
    rng, free, moved = random.Random(4), list(range(3, 80)), 0
    table = [0, 1, 2]
    for length in range(12):
        plan = python.plans.plan([length + 3], [1], [length], [table], [0])
        assert torch.equal(_logits(python, plan), _logits(native, plan)), length
        page, target = rng.randrange(3), free.pop(rng.randrange(len(free)))
        change = Rearrangement([(table[page], target)], 80)
        free.append(table[page])
        table[page] = target
        moved += target >= python.num_blocks
        for each in (python, native):
            each.rearrange(change)
            each.rearrange(Rearrangement([], 1 + max(table)))
    assert moved, "no page was borrowed"
    _check_addresses(native)


def _ranks(load: Callable[..., ModelRunner], groups: Groups, folder: Path, step: str) -> list[ModelRunner]:
    ranks = [TensorParallel(rank, 2, group) for rank, group in enumerate(groups(2))]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda tp: load(folder, tp, **OPTIONS, step=step), ranks))


def _execute(runners: list[ModelRunner], plan: StepPlan) -> list[list[SampledToken] | Exception]:
    """Each rank's tokens, or why it gave the step up; then all have joined again."""

    def execute(runner: ModelRunner) -> list[SampledToken] | Exception:
        try:
            return runner.execute(plan, [] if runner._tp.rank else [GREEDY] * len(plan.sampled))
        except (OutOfMemory, PeerGaveUp) as error:
            assert runner._tp.collectives._progress._words[BOARD_PLACE] == 0, "it computes no layer any more"
            runner.rejoin()
            return error

    with ThreadPoolExecutor(len(runners)) as pool:
        return list(pool.map(execute, runners))


@pytest.mark.parametrize("short", [0, 1])
def test_steps_that_a_rank_gave_up(
    model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner], groups: Groups, short: int
) -> None:
    """One rank has no memory while the other one waits for it in C. Both join again, and the step is repeated."""
    python, native = (_ranks(runner, groups, model_dirs("llama"), step) for step in ("python", "auto"))
    for number in range(6):
        new, context = ([4, 5, 6], 0) if number == 0 else ([number + 3], 2 + number)
        plan = native[0].plans.plan(new, [len(new)], [context], [range(10)], [0])
        program = _program(native[short])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "_grow", _no_memory)
            patch.setattr(program._program, "memory_bytes", 64)
            failed = _execute(native, plan)
        assert isinstance(failed[short], OutOfMemory)
        assert str(failed[short]) == f"rank {short}: no memory for a step"
        assert isinstance(failed[1 - short], PeerGaveUp)
        assert _execute(native, plan) == _execute(python, plan)
    for ours, theirs in zip(native, python, strict=True):
        assert torch.equal(_memory(ours), _memory(theirs))
        _check_addresses(ours)


def _no_memory(nbytes: int) -> None:
    raise MemoryError("no memory for a step")


@pytest.fixture
def resident() -> Callable[[], int]:
    def read() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    return read


def test_two_models_of_a_process_in_turn(model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner]) -> None:
    names = ("llama", "gemma2")
    python, native = (
        [runner(model_dirs(name), **MANY | {"num_blocks": 3 * MANY["num_blocks"]}, step=step) for name in names]
        for step in ("python", "auto")
    )
    batches = [Batches(each, seed) for seed, each in enumerate(python)]
    for number in range(60):
        which = number % 2
        plan = batches[which].plan(SIZES[number % len(SIZES)])
        assert torch.equal(_logits(python[which], plan), _logits(native[which], plan)), number


def test_a_model_that_is_unloaded_while_another_one_runs_leaves_nothing(
    model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner], resident: Callable[[], int]
) -> None:
    stays = runner(model_dirs("llama"), **MANY, step="auto")
    batches, stop = Batches(stays, 3), threading.Event()

    def run() -> Iterator[StepPlan]:
        while not stop.is_set():
            yield batches.plan(2)

    def load_and_leave() -> weakref.ref[Program]:
        leaves = runner(model_dirs("gemma2"), **MANY | {"num_blocks": 100_000}, step="auto")
        plan = Batches(leaves, 5).plan(64)
        assert torch.equal(_logits(leaves, plan), _logits(leaves, plan))
        leaves._cache._pages_PNC.fill_(1.0)
        return weakref.ref(_program(leaves))

    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(lambda: sum(_logits(stays, plan).isfinite().all().item() for plan in run()))
        try:
            load_and_leave()
            before = resident()
            left = [load_and_leave() for _ in range(3)]
            after = resident()
        finally:
            stop.set()
        assert steps.result(timeout=10) > 3
    assert [each() for each in left] == [None] * 3
    assert after - before < 50 * 2**20, (before, after)
    _check_addresses(stays)
