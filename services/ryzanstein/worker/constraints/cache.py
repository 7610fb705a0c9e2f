"""Compiled grammars of one model on rank 0: compiled and used in a thread, kept up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ryzanstein.constraints import Constraint
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.matching import Bits
from ryzanstein.worker.constraints.table import TokenTable

if TYPE_CHECKING:
    from ryzanstein.worker.constraints.guidance import LLMatcher, LLTokenizer

_Used = TypeVar("_Used")


class Grammars:
    """A least-recently-used cache of matchers at the beginning of an answer, to be copied for each choice.

    The table of tokens is set once, before the first constraint. Only the thread touches what is
    kept. What one cache scope compiled is not there for another: how fast an answer begins would tell
    what others asked for.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._pool = ThreadPoolExecutor(1, "grammars")
        self._kept: OrderedDict[tuple[bytes, Constraint], tuple[LLMatcher, int]] = OrderedDict()
        self._table: TokenTable | None = None
        self._tokenizer: LLTokenizer | None = None
        self._bits: Bits | None = None
        self.hits = self.misses = self.evictions = 0

    def know(self, table: bytes) -> None:
        """Takes the packed table of the model's tokens. Takes a second for 256 k of them."""
        self._table = TokenTable.decode(table)
        self._tokenizer, self._bits = self._table.tokenizer(), Bits(self._table)

    def know_soon(self, table: bytes) -> Future[None]:
        """Takes the table in the thread, before whatever is used from then on."""
        return self._pool.submit(self.know, table)

    def use(
        self, constraint: Constraint, num_bytes: int, use: Callable[[LLMatcher], _Used], root: bytes = b""
    ) -> Future[_Used]:
        """Uses a grammar in the thread, once it is compiled there if it is not kept for the scope with this root.

        `num_bytes` is what it takes, as measured elsewhere. Cancelled before its turn, it costs
        nothing.
        """
        return self._pool.submit(lambda: use(self._compiled(root, constraint, num_bytes)))

    @property
    def bits(self) -> Bits:
        """The tokens with a meaning for every grammar."""
        if self._bits is None:
            raise ValueError("the tokens are not known")
        return self._bits

    def close(self) -> None:
        """Ends the thread after what it does now."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def eos(self) -> list[int]:
        """The tokens that end a text."""
        if self._table is None:
            raise ValueError("the tokens are not known")
        return self._table.eos or [len(self._table.tokens) - 1]

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has."""
        if self._table is None:
            raise ValueError("the tokens are not known")
        return len(self._table.tokens)

    def _compiled(self, root: bytes, constraint: Constraint, num_bytes: int) -> LLMatcher:
        if (kept := self._kept.get((root, constraint))) is not None:
            self._kept.move_to_end((root, constraint))
            self.hits += 1
            return kept[0]
        self.misses += 1
        if self._table is None or self._tokenizer is None:
            raise ValueError("the tokens are not known")
        matcher = compiled(constraint, self._table, self._tokenizer)
        self._kept[root, constraint] = matcher, num_bytes
        self._bytes += num_bytes
        self._evict()
        return matcher

    def _evict(self) -> None:
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            _, (_, num_bytes) = self._kept.popitem(last=False)
            self._bytes -= num_bytes
            self.evictions += 1
