"""The exactly-once log of one generation: what each choice has generated, whoever generated it.

Rows come from attempts. An attempt that is not live is fenced off; of several live ones (a hedge) the first to bring something
new wins and fences off the others. An index that is already there is dropped, an index that skips one is the node's fault.
Knows no node protocol and no readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from ryzanstein.generation import ChoiceProgress, FinishReason, Token


class AppendResult(IntEnum):
    """What became of a row."""

    NEW = 0
    DUPLICATE = 1
    FENCED = 2


class GapError(Exception):
    """An attempt skipped an index: it cannot be believed any more."""


class ChoiceLog:
    """One choice's tokens, and from which index on which node gave them."""

    __slots__ = ("nodes", "reason", "tokens")

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.nodes: list[tuple[int, str]] = []
        self.reason: FinishReason | None = None

    def append(self, token: Token, node_id: str) -> None:
        if not self.nodes or self.nodes[-1][1] != node_id:
            self.nodes.append((len(self.tokens), node_id))
        self.tokens.append(token)

    def runs(self, first: int, most: int) -> Sequence[tuple[int, list[Token], str]]:
        """The tokens from `first` on as (first index, tokens, node id), one run for each node, at most `most` tokens each."""
        runs = []
        while first < len(self.tokens):
            node_id, end = self._node_at(first)
            runs.append((first, self.tokens[first : min(end, first + most)], node_id))
            first += len(runs[-1][1])
        return runs

    def _node_at(self, index: int) -> tuple[str, int]:
        end = len(self.tokens)
        for first, node_id in reversed(self.nodes):
            if first <= index:
                return node_id, end
            end = first
        raise IndexError(index)


class TokenLog:
    """The choices of a generation and the attempts that may write to them."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [ChoiceLog() for _ in range(num_choices)]
        self.num_tokens = 0
        self._live: frozenset[int] = frozenset()
        self._unfinished = num_choices

    @property
    def live(self) -> frozenset[int]:
        """The attempts that are believed."""
        return self._live

    @property
    def complete(self) -> bool:
        return self._unfinished == 0

    @property
    def progress(self) -> tuple[ChoiceProgress, ...]:
        """What the next attempt must be told."""
        return tuple(
            ChoiceProgress(tuple(token.token_id for token in choice.tokens), choice.reason is not None)
            for choice in self.choices
        )

    def admit(self, attempt: int) -> None:
        """Lets an attempt write, beside those that already may."""
        self._live |= {attempt}

    def fence(self, attempt: int) -> None:
        """Whatever still comes from the attempt is dropped."""
        self._live -= {attempt}

    def fence_all(self) -> None:
        """Whatever still comes is dropped, until another attempt is admitted."""
        self._live = frozenset()

    def append(self, attempt: int, choice: int, index: int, token: Token, node_id: str) -> AppendResult:
        """Takes a row if it is the next of its choice. Raises GapError for one that is later, or for an unknown choice."""
        if attempt not in self._live:
            return AppendResult.FENCED
        if choice >= len(self.choices):
            raise GapError(f"choice {choice} of {len(self.choices)}")
        row = self.choices[choice]
        if index < len(row.tokens):
            return AppendResult.DUPLICATE
        if index > len(row.tokens):
            raise GapError(f"choice {choice}: index {index} after {len(row.tokens)} tokens")
        if row.reason is not None:
            return AppendResult.DUPLICATE
        self._win(attempt)
        row.append(token, node_id)
        self.num_tokens += 1
        return AppendResult.NEW

    def finish(self, attempt: int, choice: int, reason: FinishReason) -> AppendResult:
        """Ends a choice, once. Raises GapError for an unknown choice."""
        if attempt not in self._live:
            return AppendResult.FENCED
        if choice >= len(self.choices):
            raise GapError(f"choice {choice} of {len(self.choices)}")
        if self.choices[choice].reason is not None:
            return AppendResult.DUPLICATE
        self._win(attempt)
        self._end(self.choices[choice], reason)
        return AppendResult.NEW

    def cancel(self) -> list[int]:
        """Ends every choice that still runs as CANCELLED and fences off all attempts. Returns those choices."""
        self.fence_all()
        ended = [i for i, choice in enumerate(self.choices) if choice.reason is None]
        for i in ended:
            self._end(self.choices[i], FinishReason.CANCELLED)
        return ended

    def restore(self, choice: int, first_index: int, tokens: Sequence[Token], node_id: str) -> None:
        """Appends what a journal has, before any attempt. Known indices are skipped; after a gap nothing is taken."""
        row = self.choices[choice]
        if first_index <= len(row.tokens):
            for token in tokens[len(row.tokens) - first_index :]:
                row.append(token, node_id)
                self.num_tokens += 1

    def restore_end(self, choice: int, num_tokens: int, reason: FinishReason) -> bool:
        """Ends a choice as a journal says. False: it has ended already, or its tokens are not all there."""
        row = self.choices[choice]
        if row.reason is not None or len(row.tokens) != num_tokens:
            return False
        self._end(row, reason)
        return True

    def _win(self, attempt: int) -> None:
        if len(self._live) > 1:
            self._live = frozenset({attempt})

    def _end(self, choice: ChoiceLog, reason: FinishReason) -> None:
        choice.reason = reason
        self._unfinished -= 1
