"""The exactly-once token log of one generation, whichever nodes generate its tokens.

Attempts append tokens. An attempt that is not live is fenced off. Of several live attempts (a
hedge), the first to append something new wins and fences off the others. A known index is dropped;
an index that skips one is the node's fault. Knows no node protocol and no readers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import overload

from ryzanstein.generation.request import ChoiceProgress
from ryzanstein.generation.tokens import FinishReason, NodeMove, Token

_NOBODY: frozenset[int] = frozenset()


class AppendResult(IntEnum):
    """What happened to a token, or to the end of a choice."""

    NEW = 0
    DUPLICATE = 1
    FENCED = 2


class GapError(Exception):
    """An attempt skipped an index: it can no longer be trusted."""


class PackedTokens(Sequence[Token]):
    """Tokens without log probabilities, as two flat rows: a garbage collection looks at no token of an ended answer."""

    __slots__ = ("_ids", "_texts")

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._ids = array("I", [token.token_id for token in tokens])
        self._texts = tuple([token.text for token in tokens])

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Token]:
        return map(Token, self._ids, self._texts)

    @overload
    def __getitem__(self, index: int) -> Token: ...

    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...

    def __getitem__(self, index: int | slice) -> Token | list[Token]:
        if isinstance(index, slice):
            return list(map(Token, self._ids[index], self._texts[index]))
        return Token(self._ids[index], self._texts[index])


class ChoiceLog:
    """One choice's tokens, which node generated them from which index, and how it came there."""

    __slots__ = ("_written", "moves", "nodes", "reason", "tokens")

    def __init__(self) -> None:
        self._written: list[Token] = []
        self.tokens: Sequence[Token] = self._written
        self.nodes: list[tuple[int, str]] = []
        self.moves: dict[int, NodeMove] = {}
        self.reason: FinishReason | None = None

    def append(self, token: Token, node_id: str) -> None:
        if not self.nodes or self.nodes[-1][1] != node_id:
            self.nodes.append((len(self._written), node_id))
        self._written.append(token)

    def pack(self) -> None:
        """Makes the tokens small. Nothing can be appended afterwards."""
        if not any(token.logprobs for token in self._written):
            self.tokens, self._written = PackedTokens(self._written), []

    def runs(self, first: int, most: int) -> Sequence[tuple[int, Sequence[Token], str]]:
        """Returns the tokens from `first` as (first index, tokens, node id).

        Each run has tokens of one node, and at most `most` of them.
        """
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
    """The choices of a generation, and the attempts that may write to them."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [ChoiceLog() for _ in range(num_choices)]
        self.num_tokens = 0
        self._live = _NOBODY
        self._unfinished = num_choices

    @property
    def live(self) -> frozenset[int]:
        """The attempts that may write."""
        return self._live

    @property
    def complete(self) -> bool:
        return self._unfinished == 0

    @property
    def last_node(self) -> str:
        """The node that generated the last token of a choice; empty while there is none."""
        return next((choice.nodes[-1][1] for choice in reversed(self.choices) if choice.nodes), "")

    @property
    def progress(self) -> tuple[ChoiceProgress, ...]:
        """What the next attempt continues from."""
        return tuple(
            ChoiceProgress(tuple(token.token_id for token in choice.tokens), choice.reason is not None)
            for choice in self.choices
        )

    def admit(self, attempt: int) -> None:
        """Lets an attempt write, in addition to those that already may."""
        self._live |= {attempt}

    def fence(self, attempt: int) -> None:
        """Drops everything that still arrives from the attempt."""
        self._live = (self._live - {attempt}) or _NOBODY

    def fence_all(self) -> None:
        """Drops everything that still arrives, until another attempt is admitted."""
        self._live = _NOBODY

    def append(self, attempt: int, choice: int, index: int, token: Token, node_id: str) -> AppendResult:
        """Appends a token if it is the next of its choice.

        Raises GapError for a later index, or for an unknown choice.
        """
        if attempt not in self._live:
            return AppendResult.FENCED
        if choice >= len(self.choices):
            raise GapError(f"unknown choice {choice} of {len(self.choices)}")
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
            raise GapError(f"unknown choice {choice} of {len(self.choices)}")
        if self.choices[choice].reason is not None:
            return AppendResult.DUPLICATE
        self._win(attempt)
        self._end(self.choices[choice], reason)
        return AppendResult.NEW

    def cancel(self) -> list[int]:
        """Ends every running choice as CANCELLED and returns those choices.

        Fences off all attempts.
        """
        return self.end_all(FinishReason.CANCELLED)

    def end_all(self, reason: FinishReason) -> list[int]:
        """Ends every running choice for this reason and returns those choices. Fences off all attempts."""
        self.fence_all()
        ended = [i for i, choice in enumerate(self.choices) if choice.reason is None]
        for i in ended:
            self._end(self.choices[i], reason)
        return ended

    def restore(self, choice: int, first_index: int, tokens: Sequence[Token], node_id: str) -> None:
        """Appends the tokens of a journal, before any attempt.

        Known indices are skipped; after a gap nothing is appended.
        """
        row = self.choices[choice]
        if first_index <= len(row.tokens):
            for token in tokens[len(row.tokens) - first_index :]:
                row.append(token, node_id)
                self.num_tokens += 1

    def restore_end(self, choice: int, num_tokens: int, reason: FinishReason) -> bool:
        """Ends a choice as recorded in a journal.

        Returns False when it has ended already, or when some of its tokens are missing.
        """
        row = self.choices[choice]
        if row.reason is not None or len(row.tokens) != num_tokens:
            return False
        self._end(row, reason)
        return True

    def pack(self) -> None:
        """Makes the tokens of a log small that is complete for good."""
        for choice in self.choices:
            choice.pack()

    def _win(self, attempt: int) -> None:
        if len(self._live) > 1:
            self._live = frozenset({attempt})

    def _end(self, choice: ChoiceLog, reason: FinishReason) -> None:
        choice.reason = reason
        self._unfinished -= 1
