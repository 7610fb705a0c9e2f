"""Sabotage of a rank from its own process.

Python imports this at start if its directory is on PYTHONPATH.

SIGRTMIN+1: this rank skips its next collective. SIGRTMIN+2: the logits of the next step are NaN.
SIGRTMIN+3: the next step takes 0.5 s longer. SIGRTMIN+4: the next step waits in C for ever, and holds
the interpreter. A rank inherits the handlers from the process that it
is forked from; nothing changes before a signal arrives. The laboratory uses it for faults that
cannot be made from outside.

RYZANSTEIN_PACE names a file with a number of microseconds: each step takes this much longer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partialmethod
from typing import Any

_SKIP_COLLECTIVE = signal.SIGRTMIN + 1
_NAN_LOGITS = signal.SIGRTMIN + 2
_LONG_STEP = signal.SIGRTMIN + 3
_HANG = signal.SIGRTMIN + 4
_LONGER_S = 0.5
_RANK_MODULE = "ryzanstein.worker.ranks.rank"
_COLLECTIVES = "ryzanstein.worker.collectives.shm"
_HEAD = "ryzanstein.worker.model.layers.vocabulary"
_PROGRAM = "ryzanstein.worker.model.program.running"


def _spoil_once(*methods: tuple[str, str, str, Callable[..., Any]]) -> None:
    """Replaces methods until one of them is called: module, class, name, and what replaces it.

    The modules are already loaded, because a computing rank has imported them.
    """
    owners = [getattr(sys.modules[module], owner) for module, owner, _, _ in methods]
    honest = [getattr(owner, name) for owner, (_, _, name, _) in zip(owners, methods, strict=True)]

    def once(index: int, *arguments: Any) -> Any:
        for owner, (_, _, name, _), method in zip(owners, methods, honest, strict=True):
            setattr(owner, name, method)
        return methods[index][3](honest[index], *arguments)

    for index, (owner, (_, _, name, _)) in enumerate(zip(owners, methods, strict=True)):
        setattr(owner, name, partialmethod(_call, once, index))


def _call(self: Any, once: Callable[..., Any], index: int, *arguments: Any) -> Any:
    return once(index, self, *arguments)


def _skip_collective(*_: object) -> None:
    _spoil_once(
        (_COLLECTIVES, "ShmCollectives", "all_reduce", lambda honest, self, x: x),
        (_PROGRAM, "Program", "_run", _run_without_a_sum),
    )


def _run_without_a_sum(honest: Callable[..., Any], self: Any, first: int, last: int) -> None:
    """Runs ops of a step in C, but for the first sum over ranks."""
    reduce = sys.modules["ryzanstein.worker.kernels.functions.steps.program"].REDUCE
    skipped = next((number for number in range(first, last) if self._structs[number].op == reduce), last)
    honest(self, first, skipped)
    if skipped < last:
        honest(self, skipped + 1, last)


def _nan_logits(*_: object) -> None:
    _spoil_once(
        (_HEAD, "VocabParallelHead", "_local", lambda honest, self, x: honest(self, x).fill_(float("nan"))),
        (_PROGRAM, "Program", "logits", lambda honest, self, inputs: honest(self, inputs).fill_(float("nan"))),
        (_PROGRAM, "Program", "greatest", _nan_greatest),
    )


def _nan_greatest(honest: Callable[..., Any], self: Any, inputs: Any) -> tuple[list[float], list[int]]:
    best, tokens = honest(self, inputs)
    return [float("nan")] * len(best), [0] * len(tokens)


def _long_step(*_: object) -> None:
    def longer(honest: Callable[..., Any], *arguments: Any) -> Any:
        time.sleep(_LONGER_S)
        return honest(*arguments)

    _spoil_once(("ryzanstein.worker.model.runner", "ModelRunner", "execute", longer))


def _hang(*_: object) -> None:
    _spoil_once(
        (_COLLECTIVES, "ShmCollectives", "all_reduce", wait_for_ever),
        (_PROGRAM, "Program", "_run", wait_for_ever),
    )


def wait_for_ever(honest: Callable[..., Any], *arguments: Any) -> Any:
    """Takes a lock twice, in C, before it would go on. No signal but SIGKILL ends that."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
    return honest(*arguments)


def _keep_pace() -> None:
    """Slows each step of a rank that was just forked.

    The process that it was forked from has imported what the rank runs.
    """
    with open(os.environ["RYZANSTEIN_PACE"], "rb") as file:
        pace = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    runner = sys.modules["ryzanstein.worker.model.runner"].ModelRunner
    honest = runner.execute

    def execute(*arguments: Any) -> Any:
        time.sleep(int.from_bytes(pace[:8], "little") / 1e6)
        return honest(*arguments)

    runner.execute = execute


if _RANK_MODULE in sys.orig_argv:
    if "RYZANSTEIN_PACE" in os.environ:
        os.register_at_fork(after_in_child=_keep_pace)
    signal.signal(_LONG_STEP, _long_step)
    signal.signal(_SKIP_COLLECTIVE, _skip_collective)
    signal.signal(_NAN_LOGITS, _nan_logits)
    signal.signal(_HANG, _hang)
