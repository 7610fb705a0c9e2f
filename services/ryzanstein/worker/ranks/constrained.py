"""Constrained groups on rank 0, between their submit and the engine: their grammars are compiled first.

Other groups run meanwhile. The agent has had every grammar judged in a process of its own, so a
compile here takes no longer than was allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.constraints.cache import Grammars
from ryzanstein.worker.constraints.matching import GrammarState, TokenPatience
from ryzanstein.worker.engine.messages import ConstraintStats, SubmitGroup
from ryzanstein.worker.engine.plan import TokenConstraint

if TYPE_CHECKING:
    from ryzanstein.worker.constraints.guidance import LLMatcher
    from ryzanstein.worker.constraints.masks import StepMasks

Prepared = tuple[SubmitGroup, list[TokenConstraint] | RyzansteinError]


class ConstrainedGroups:
    """The groups that are `waiting` because their grammars are being compiled, and follow the tokens of earlier attempts.

    `used` tells whether there was ever one. `moved` is called when a token of a grammar took long.
    """

    def __init__(self, grammars: Grammars, masks: StepMasks, moved: Callable[[], None] = lambda: None) -> None:
        self._grammars, self._masks, self._moved = grammars, masks, moved
        self.waiting: dict[int, tuple[SubmitGroup, Future[list[TokenConstraint]]]] = {}
        self.used = False

    @property
    def computes_ahead(self) -> bool:
        """Whether choices sit out steps until their masks are known."""
        return self._masks.turns.pending

    def know(self, table: bytes) -> None:
        """Takes the table of the model's tokens, before the first group."""
        self._grammars.know(table)

    def take(self, message: SubmitGroup) -> None:
        """Starts to prepare a group with a constraint."""
        if message.sampling.constraint is None:
            raise ValueError("the group has no constraint")
        self.used = True
        use = partial(self._states, message)
        constraint, num_bytes = message.sampling.constraint, message.grammar_bytes
        self.waiting[message.group] = message, self._grammars.use(constraint, num_bytes, use, message.cache_root)

    def cancel(self, group: int) -> None:
        """Forgets a group. Its grammar is not compiled if that has not begun."""
        if (waiting := self.waiting.pop(group, None)) is not None:
            waiting[1].cancel()

    def ready(self) -> Iterator[Prepared]:
        """Yields the groups that are prepared, in their order: with a constraint for each choice, or an error."""
        for group, (message, future) in list(self.waiting.items()):
            if future.done():
                del self.waiting[group]
                yield message, _prepared(future)

    def stats(self) -> ConstraintStats:
        grammars, masks = self._grammars, self._masks
        computed_s = masks.computed_s + masks.turns.computed_s
        return ConstraintStats(grammars.hits, grammars.misses, grammars.evictions, computed_s, masks.waited_s)

    def _states(self, message: SubmitGroup, matcher: LLMatcher) -> list[TokenConstraint]:
        bits, keeps_on, patience = self._grammars.bits, message.sampling.ignore_eos, TokenPatience(self._moved)
        return [
            GrammarState(matcher.deep_copy(), bits, generated, keeps_on=keeps_on, patience=patience, turns=self._masks.turns)
            for generated in message.generated
        ]


def _prepared(future: Future[list[TokenConstraint]]) -> list[TokenConstraint] | RyzansteinError:
    if (error := future.exception()) is not None:
        return errors.internal(f"rank 0 could not compile the constraint: {type(error).__name__}: {error}"[:512])
    return future.result()
