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
from typing import Any

_SKIP_COLLECTIVE = signal.SIGRTMIN + 1
_NAN_LOGITS = signal.SIGRTMIN + 2
_LONG_STEP = signal.SIGRTMIN + 3
_HANG = signal.SIGRTMIN + 4
_LONGER_S = 0.5
_RANK_MODULE = "ryzanstein.worker.ranks.rank"


def _spoil_once(module: str, owner: str, method: str, spoiled: Callable[..., Any]) -> None:
    """Replaces a method until it is called once.

    The module is already loaded, because a computing rank has imported it.
    """
    found = getattr(sys.modules[module], owner)
    honest = getattr(found, method)

    def once(*arguments: Any) -> Any:
        setattr(found, method, honest)
        return spoiled(honest, *arguments)

    setattr(found, method, once)


def _skip_collective(*_: object) -> None:
    module = "ryzanstein.worker.collectives.shm"
    _spoil_once(module, "ShmCollectives", "all_reduce", lambda honest, self, x: x)


def _nan_logits(*_: object) -> None:
    module = "ryzanstein.worker.model.layers.vocabulary"
    _spoil_once(module, "VocabParallelHead", "_local", lambda honest, self, x: honest(self, x).fill_(float("nan")))


def _long_step(*_: object) -> None:
    def longer(honest: Callable[..., Any], *arguments: Any) -> Any:
        time.sleep(_LONGER_S)
        return honest(*arguments)

    _spoil_once("ryzanstein.worker.model.runner", "ModelRunner", "execute", longer)


def _hang(*_: object) -> None:
    _spoil_once("ryzanstein.worker.collectives.shm", "ShmCollectives", "all_reduce", wait_for_ever)


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
