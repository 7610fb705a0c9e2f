"""Sabotage of a rank, from its own process: Python imports this at start when its directory is on PYTHONPATH.

SIGRTMIN+1: the next collective of this rank is skipped. SIGRTMIN+2: the logits of the next step are NaN. A rank has its
handlers from the process that it was forked from; nothing is changed before a signal comes. It is how the laboratory makes
faults that cannot be made from outside.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

_SKIP_COLLECTIVE = signal.SIGRTMIN + 1
_NAN_LOGITS = signal.SIGRTMIN + 2
_RANK_MODULE = "ryzanstein.worker.ranks.rank"


def _spoil_once(module: str, owner: str, method: str, spoiled: Callable[..., Any]) -> None:
    """Replaces a method until it was called once. The module is there already: a rank that computes has imported it."""
    found = getattr(sys.modules[module], owner)
    honest = getattr(found, method)

    def once(*arguments: Any) -> Any:
        setattr(found, method, honest)
        return spoiled(honest, *arguments)

    setattr(found, method, once)


def _skip_collective(*_: object) -> None:
    module = "ryzanstein.worker.model.collectives.shm"
    _spoil_once(module, "ShmCollectives", "all_reduce", lambda honest, self, x: x)


def _nan_logits(*_: object) -> None:
    module = "ryzanstein.worker.model.layers.vocabulary"
    _spoil_once(module, "VocabParallelHead", "_local", lambda honest, self, x: honest(self, x).fill_(float("nan")))


if _RANK_MODULE in sys.orig_argv:
    signal.signal(_SKIP_COLLECTIVE, _skip_collective)
    signal.signal(_NAN_LOGITS, _nan_logits)
