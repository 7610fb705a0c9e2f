"""Tells a request that the model cannot answer from ranks that can answer nothing any more.

A row whose logits are not numbers may have a prompt that leads there on every node (a token whose embedding is broken, a
checkpoint that overflows), or its node may be at fault (memory that lost its bits). Failing over is right in both cases;
blaming the node is right in one. So the same ranks are asked, at once, for a token that has nothing to do with the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.generation import SamplingParams
from ryzanstein.worker.engine.plan import Executor, OutOfMemory, SampleRow, SequencesFailed, StepPlan

# Ids that every vocabulary has. Some of them may be broken themselves, or reserved and never trained.
_TOKENS = (1, 2, 3, 0)
_GREEDY = SamplingParams(temperature=0.0)


class RanksUnsound(Exception):
    """The ranks compute no numbers whatever they are asked: they must be started again."""


class Probe:
    """Asks through the executor that runs the steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def require_sound(self, step: int, blocks: Sequence[int]) -> None:
        """Raises RanksUnsound. `blocks` are those of a sequence that has failed: the last one, which nobody shares, is
        written to."""
        failure = ""
        for token_id in _TOKENS:
            plan = StepPlan(step, [token_id], [1], [0], [[blocks[-1]]], [0])
            try:
                self._executor.execute(plan, [SampleRow(_GREEDY, 0, 0, [token_id], [])])
            except SequencesFailed as failed:
                failure = next(iter(failed.rows.values()), "")
            except OutOfMemory:
                return  # nothing was shown; a fault that lasts is asked about again at the next row
            else:
                return
        raise RanksUnsound(f"{failure}, and so are those of {len(_TOKENS)} single tokens: the ranks are unsound")
