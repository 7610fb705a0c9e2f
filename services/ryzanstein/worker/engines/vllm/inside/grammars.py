"""The constraints of choices in vLLM: compiled in a thread while the prompt computes, and masks for each step.

The table of tokens comes from an agent, so both see the bytes that its detokenizer writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.constraints.cache import Grammars
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.constraints.matching import NONE_ALLOWED, TOO_COMPLEX, TOO_SLOW, UNSATISFIED, GrammarState
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.plan import SampleRow, TokenConstraint
from ryzanstein.worker.engines.asking import READY, UNKNOWN, WAIT, AskedRow, ConstraintEnd, table_name

if TYPE_CHECKING:
    from ryzanstein.worker.constraints.guidance import LLMatcher

_MAX_BYTES = 64 * 2**20
_MAX_TABLES = 4
_MASK_THREADS = 2
_FAILURES = {
    TOO_SLOW: ConstraintEnd.TOO_SLOW,
    UNSATISFIED: ConstraintEnd.UNSATISFIED,
    TOO_COMPLEX: ConstraintEnd.TOO_COMPLEX,
    NONE_ALLOWED: ConstraintEnd.NONE_ALLOWED,
}


class _Tables:
    """One table of tokens, and what was compiled for it."""

    def __init__(self, table: bytes) -> None:
        self.grammars = Grammars(_MAX_BYTES)
        self.known = self.grammars.know_soon(table)


class RowGrammars:
    """The constraints of all choices in this process. What it compiles does not hold up the steps of others."""

    def __init__(self) -> None:
        self._tables: OrderedDict[bytes, _Tables] = OrderedDict()
        self._masks: StepMasks | None = None

    def version(self) -> tuple[int, ...]:
        """Returns the version of llguidance; zeros without one."""
        try:
            from ryzanstein.worker.constraints.guidance import guidance_version
        except ImportError:
            return 0, 0, 0
        return guidance_version()

    def prepare(self, asked: AskedRow) -> Preparation:
        """Begins what a request wants prepared."""
        if asked.tokens:
            self._learn(asked.tokens)
        name = table_name(asked.tokens) if asked.tokens else asked.table
        if (tables := self._tables.get(name)) is None:
            return Preparation(None)
        group = asked.group
        if group is None or (constraint := group.sampling.constraint) is None:
            return Preparation(tables.known, partial(self.escape, name))
        return Preparation(tables.grammars.use(constraint, group.grammar_bytes, _compiles, group.cache_root))

    def state(self, asked: AskedRow, group: SubmitGroup, generated: Sequence[int]) -> Future[GrammarState] | None:
        """Begins to compile the constraint of a choice, and to follow its tokens; None: its table is not known."""
        constraint = group.sampling.constraint
        if constraint is None or (tables := self._tables.get(asked.table)) is None:
            return None
        self._tables.move_to_end(asked.table)
        begin = partial(_begin, tables.grammars, group, generated)
        return tables.grammars.use(constraint, group.grammar_bytes, begin, group.cache_root)

    def vocab_size(self, table: bytes) -> int:
        """Returns how many tokens a table has that is known."""
        return self._tables[table].grammars.vocab_size if table in self._tables else 0

    def escape(self, table: bytes) -> int:
        """Returns the token of a known table that says that a constrained choice ends: one that ends texts."""
        return self._tables[table].grammars.eos[0] if table in self._tables else 0

    def masks(self, rows: Sequence[SampleRow], vocab_size: int) -> npt.NDArray[np.uint32] | None:
        """Returns the tokens that each row may draw, see `StepMasks`. Valid until the next call."""
        if not any(row.constraint is not None for row in rows):
            return None
        if self._masks is None:
            self._masks = StepMasks(vocab_size, _MASK_THREADS)
        self._masks.begin(rows)
        return self._masks.wait()

    def _learn(self, tokens: bytes) -> None:
        if (name := table_name(tokens)) in self._tables:
            return
        self._tables[name] = _Tables(tokens)
        if len(self._tables) > _MAX_TABLES:
            self._tables.popitem(last=False)[1].grammars.close()


class Preparation:
    """Something that a request waits for: `work`, or None if its table is not known."""

    def __init__(self, work: Future[None] | None, escape: Callable[[], int] = int) -> None:
        self._work, self._escape = work, escape

    def answer(self, index: int) -> int:
        """Returns the token of the answer at this index: how far it is, then the escape token of a table that is ready."""
        if index:
            return self._escape() if self.answer(0) == READY else 0
        if self._work is None or _failed(self._work):
            return UNKNOWN
        return READY if self._work.done() else WAIT


def failed(state: TokenConstraint | None) -> ConstraintEnd | None:
    """Returns why a constraint can no longer be followed; None: it can, or there is none."""
    if state is None or not state.failure:
        return None
    return next((ending for text, ending in _FAILURES.items() if text in state.failure), ConstraintEnd.TOO_COMPLEX)


def _compiles(matcher: LLMatcher) -> None:
    """Does nothing: the grammar is compiled by then. The choice reports a refusal."""


def _begin(grammars: Grammars, group: SubmitGroup, generated: Sequence[int], matcher: LLMatcher) -> GrammarState:
    return GrammarState(matcher.deep_copy(), grammars.bits, generated, keeps_on=group.sampling.ignore_eos)


def _failed(work: Future[None]) -> bool:
    """Returns whether it has ended without a result: with an error, or because its table was dropped for others."""
    return work.cancelled() or (work.done() and work.exception() is not None)
