"""Steps in C of several ranks, each with several threads, one of which comes late: longer than one call waits."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.program.conftest import Groups
from tests.worker.model.program.test_program import OPTIONS

import ryzanstein.worker.collectives.shm
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.meeting import AGAIN
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.collectives.shm import ShmCollectives
from ryzanstein.worker.kernels.functions.steps.program import (
    REDUCE,
    OpStruct,
    ProgramFunctions,
    ProgramStruct,
    StepStruct,
)
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.ranks.health.board import Board, RankBoard, board_bytes

LATE_S = 0.12
NUM_THREADS = 3
SIZES = (7, 2048, 20_000, 262_145, 5)
"""Numbers of a sum: in one part, in one for each rank where there are three, and in several chunks."""


class Late:
    """The functions of a program. It stops before those ops, and counts the calls that are to be repeated."""

    def __init__(self, functions: ProgramFunctions, late_at: frozenset[int] = frozenset()) -> None:
        self._functions, self._late_at = functions, late_at
        self.repeated = 0

    def run(self, program: ProgramStruct, step: StepStruct, ops: tuple[int, int], again: bool) -> int:
        first, last = ops
        for stop in sorted(at for at in self._late_at if first < at < last and not again):
            if status := self._run(program, step, (first, stop), again):
                return status
            time.sleep(LATE_S)
            first = stop
        return self._run(program, step, (first, last), again)

    def _run(self, program: ProgramStruct, step: StepStruct, ops: tuple[int, int], again: bool) -> int:
        status = self._functions.run(program, step, ops, again)
        self.repeated += status == AGAIN
        return status


def _sum_in_c(functions: Late, group: ShmCollectives, values: list[torch.Tensor]) -> None:
    """Sums all in one program."""
    ops = (OpStruct * len(values))(*(OpStruct(op=REDUCE, in_=0, num_inputs=len(each)) for each in values))
    begin = 0
    arena = torch.cat(values)
    for op, each in zip(ops, values, strict=True):
        op.in_, begin = begin, begin + len(each)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    program = ProgramStruct(
        ops=addressof(ops),
        num_ops=len(ops),
        threads=NUM_THREADS,
        arena=arena.data_ptr(),
        memory=(memory.data_ptr() + 63) // 64 * 64,
        memory_bytes=(1 << 16) - 64,
        meeting=addressof(group.meeting),
    )
    first, again = 0, False
    while status := functions.run(program, StepStruct(num_tokens=1), (first, len(ops)), again):
        assert status == AGAIN
        first, again = program.reached, True
    for each, found in zip(values, arena.split([len(each) for each in values]), strict=True):
        each.copy_(found)


def _values(rank: int) -> list[torch.Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size)) for size in SIZES]


def _expected(size: int) -> list[torch.Tensor]:
    total = _values(0)
    for rank in range(1, size):
        total = [a + b for a, b in zip(total, _values(rank), strict=True)]
    return total


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("late", [0, 1])
def test_sums_are_resumed_where_a_rank_was_late(kernels: NativeKernels, groups: Groups, size: int, late: int) -> None:
    functions = [
        Late(kernels.program, frozenset(range(1, len(SIZES))) if rank == late else frozenset()) for rank in range(size)
    ]
    values = [_values(rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(_sum_in_c, functions, groups(size), values))
    for found in values:
        assert all(map(torch.equal, found, _expected(size)))
    assert functions[late].repeated == 0
    assert all(each.repeated >= len(SIZES) - 1 for each in functions if each is not functions[late])


def test_a_sum_is_resumed_after_its_first_half(kernels: NativeKernels, groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three ranks sums a part, then takes the others' parts. One computes in Python, and comes late with its part."""
    honest = ryzanstein.worker.collectives.shm._sum_in_order

    def slow(*arguments: Any) -> None:
        time.sleep(LATE_S)
        honest(*arguments)

    monkeypatch.setattr(ryzanstein.worker.collectives.shm, "_sum_in_order", slow)
    opened = groups(3)
    opened[2].use(None)
    functions = [Late(kernels.program) for _ in range(2)]
    values = [_values(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        native = [pool.submit(_sum_in_c, *each) for each in zip(functions, opened, values, strict=False)]
        python = pool.submit(lambda: [opened[2].all_reduce(each) for each in values[2]])
        for sums in (*native, python):
            sums.result(timeout=30)
    for found in values:
        assert all(map(torch.equal, found, _expected(3)))
    assert all(each.repeated > 2 for each in functions)


def _logits(runners: list[ModelRunner], steps: int) -> list[torch.Tensor]:
    """The logits of a prompt and of so many tokens after it, by all ranks."""
    found = []
    with ThreadPoolExecutor(len(runners)) as pool:
        for step in range(steps):
            new, context = ([5, 6, 7, 8, 9], 0) if step == 0 else ([step], 4 + step)
            plan = runners[0].plans.plan(new, [len(new)], [context], [range(20)], [0])
            first, *_ = pool.map(lambda runner, plan=plan: runner.hidden_logits(plan), runners)
            assert first is not None
            found.append(first)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_a_model_computes_the_same_where_a_rank_was_late(
    model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner], groups: Groups, threads: Any, name: str
) -> None:
    """The second half of Mixtral's layers is Python's."""
    folder = model_dirs(name)

    def load(step: str) -> list[ModelRunner]:
        ranks = [TensorParallel(rank, 2, group) for rank, group in enumerate(groups(2))]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda tp: runner(folder, tp, **OPTIONS | {"num_threads": 2}, step=step), ranks))

    with threads(2):
        python, native, late = load("python"), load("auto"), load("auto")
        functions = []
        for rank, each in enumerate(late):
            program = each._decoder.program
            assert program is not None
            assert program._program.threads == 2
            program._functions = Late(
                program._functions, frozenset(range(2, program._program.num_ops, 5)) if rank else frozenset()
            )
            functions.append(program._functions)
        expected = _logits(python, 3)
        for found in (_logits(native, 3), _logits(late, 3)):
            assert all(map(torch.equal, found, expected))
    assert functions[0].repeated > 3


def test_the_board_shows_where_a_rank_is_that_has_no_other(
    model_dirs: Callable[[str], Path], runner: Callable[..., ModelRunner]
) -> None:
    fd = os.memfd_create("board")
    os.ftruncate(fd, board_bytes(1))
    rank, board = RankBoard(fd, 1, 0), Board(fd, 1)
    loaded = runner(model_dirs("llama"), TensorParallel(0, 1, LocalCollectives(rank.address)), **OPTIONS)
    plan = loaded.plans.plan([5] * 64, [64], [0], [range(16)], [0])
    expected = {f"layer {layer}, {place}" for layer in range(3) for place in ("qkv", "attention", "o", "gate-up", "down")}
    seen: set[str] = set()
    with ThreadPoolExecutor(1) as pool:
        deadline = time.monotonic() + 10
        while len(seen & expected) < 4 and time.monotonic() < deadline:
            step = pool.submit(loaded.hidden_logits, plan)
            while not step.done():
                seen.add(board.read()[0].place)
                time.sleep(0.0002)  # the core may be the same
            assert board.read()[0].place == ""
    assert len(seen & expected) >= 4
    assert seen <= expected | {"", "embedding", "head"}
    board.close()
    rank.close()
    os.close(fd)
