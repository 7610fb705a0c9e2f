"""Distinguishes a request that the model cannot answer from ranks that can answer nothing.

Logits that are not finite may come from a prompt that leads there on every node (a token whose
embedding is broken, a checkpoint that overflows), or from a faulty node (corrupted memory). Failing
over is right in both cases; blaming the node is right in only one. So the same ranks are given, at
once, a token that has nothing to do with the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.generation.sampling import SamplingParams
from ryzanstein.worker.engine.plan import Executor, OutOfMemory, SampleRow, SequencesFailed, StepPlan

# Ids that every vocabulary has. Some of them may be broken themselves, or reserved and never
# trained.
_TOKENS = (1, 2, 3, 0)
_GREEDY = SamplingParams(temperature=0.0)


class RanksUnsound(Exception):
    """The ranks compute no finite logits for any input: they must be restarted."""


class Probe:
    """A probe that uses the executor of the steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def require_sound(self, step: int, blocks: Sequence[int], num_groups: int) -> None:
        """Raises RanksUnsound if the ranks compute no finite logits for any probe token.

        `blocks` are the last ones, in each group of layers and then of hot pages, of a sequence that
        has failed; the probe writes to them, because they are not shared.
        """
        failure = ""
        tables = [[block] for block in blocks]
        hot_tables = tables[num_groups:]
        for token_id in _TOKENS:
            plan = StepPlan(
                step, [token_id], [1], [0], tables[:num_groups], [0], hot_tables=hot_tables, hot_first=[0] * len(hot_tables)
            )
            try:
                self._executor.execute(plan, [SampleRow(_GREEDY, 0, 0, [token_id], [])])
            except SequencesFailed as failed:
                failure = next(iter(failed.rows.values()), "")
            except OutOfMemory:
                return  # nothing was shown; a persistent fault is probed again at the next failed row
            else:
                return
        raise RanksUnsound(f"{failure}, nor are those of {len(_TOKENS)} single-token probes: the ranks are unsound")
