"""Plans that no scheduler made: for a warm-up, a trial, a measurement.

A sequence is described by one table of pages, as if all layers kept all tokens in one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.plan import StateRun, StepPlan


@dataclass(frozen=True, slots=True)
class PlainPlans:
    """Plans for a cache: page n is block n x G to n x G + G - 1 of it, one for each of G groups.

    Page n is written to hot page n modulo `num_hot`, if there are any: as many sequences may take
    turns as have their newest pages there. The state after the tokens of page n is in slot n modulo
    `num_states`, if there are any, so that a sequence may begin with whole pages of another.
    """

    extents: Extents
    num_hot: int = 0
    num_states: int = 0

    def plan(
        self,
        token_ids: list[int],
        num_new: list[int],
        num_context: list[int],
        tables: Sequence[Sequence[int]],
        sampled: list[int],
        *,
        full_logits: bool = False,
    ) -> StepPlan:
        """Returns the plan of a step, see `StepPlan`; `tables` [S][B] are pages."""
        num_groups = len(self.extents.windows)
        blocks = [[page * num_groups + group for page in table] for group in range(num_groups) for table in tables]
        plan = (0, token_ids, num_new, num_context, blocks, sampled, full_logits)
        if not self.num_hot:
            return StepPlan(*plan, runs=list(self._runs(num_new, num_context, tables)))
        firsts = [self.extents.first_seen(self.extents.hot_window, start) for start in num_context]
        fed = zip(tables, firsts, num_context, num_new, strict=True)
        hot = [
            [page % self.num_hot for page in table[first : self.extents.pages(start + count)]]
            for table, first, start, count in fed
        ]
        return StepPlan(*plan, hot_tables=hot, hot_first=firsts)

    def _runs(self, num_new: list[int], num_context: list[int], tables: Sequence[Sequence[int]]) -> Iterator[StateRun]:
        size = self.extents.block_size
        for count, start, table in zip(num_new, num_context, tables, strict=True):
            at, end = start, start + count
            while self.num_states and at < end:
                page, stop = at // size, min(end, (at // size + 1) * size)
                source = -1 if at == 0 else table[(at - 1) // size] % self.num_states
                yield stop - at, source, table[page] % self.num_states
                at = stop
