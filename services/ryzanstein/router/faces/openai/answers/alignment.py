"""Aligns log probabilities with the text: the rows of a choice join to its text, byte for byte.

The text of a token can be withheld because it may begin a stop string, or because a character is
incomplete. Its row waits for the text. When a stop string ended the answer, the row of the token in
which it begins is cut, and later rows are dropped.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ryzanstein.generation.tokens import Token, TokenLogprobs

_State = tuple[bytes, int]


class LogprobRow(NamedTuple):
    """A token's log probability and its part of the text.

    `kept` are the token's bytes that are in the text, from its character `offset`. `text` is the
    token, cut in the same way.
    """

    logprobs: TokenLogprobs
    text: str
    kept: bytes
    offset: int


class _Held(NamedTuple):
    """A row that waits for its text.

    The token's last character, perhaps incomplete, ends before character `end`. `before` is the
    decoder's state before the token.
    """

    token: Token
    own: bytes
    before: _State
    begin: int
    end: int


class Alignment:
    """Follows one choice from its first token.

    It counts characters, because bytes that are not UTF-8 differ in the text.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: deque[_Held] = deque()
        self._decoded = 0
        self._certain = 0

    def push(self, token: Token) -> Iterator[LogprobRow]:
        """Yields the rows that became certain with a token: its own, earlier ones, or none."""
        self._certain += len(token.text)
        if token.logprobs is not None:
            self._hold(token, token.logprobs)
        while self._held and self._held[0].end <= self._certain:
            yield _whole(self._held.popleft())

    def end(self) -> Iterator[LogprobRow]:
        """Yields the rows that are left when there are no more tokens, cut to the text."""
        for held in self._held:
            if held.begin < self._certain:
                yield self._cut(held)
        self._held.clear()

    def _hold(self, token: Token, logprobs: TokenLogprobs) -> None:
        own = token.text.encode("utf-8", "replace") if logprobs.token_bytes is None else logprobs.token_bytes
        before, begin = self._decoder.getstate(), self._decoded
        self._decoded += len(self._decoder.decode(own))
        is_open = bool(self._decoder.getstate()[0])
        self._held.append(_Held(token, own, before, begin, self._decoded + is_open))

    def _cut(self, held: _Held) -> LogprobRow:
        """Returns the row with the fewest bytes that cover the token's characters of the text."""
        kept = next(held.own[:n] for n in range(len(held.own) + 1) if self._reaches(held, n))
        return LogprobRow(_logprobs(held), kept.decode("utf-8", "replace"), kept, held.begin)

    def _reaches(self, held: _Held, num_bytes: int) -> bool:
        if num_bytes == len(held.own):
            return True
        self._decoder.setstate(held.before)
        return held.begin + len(self._decoder.decode(held.own[:num_bytes])) >= self._certain


def aligned(tokens: Iterable[Token]) -> tuple[str, list[LogprobRow]]:
    """Returns the text of a whole choice, and the log probabilities that belong to it."""
    alignment = Alignment()
    parts: list[str] = []
    rows: list[LogprobRow] = []
    for token in tokens:
        parts.append(token.text)
        rows += alignment.push(token)
    return "".join(parts), [*rows, *alignment.end()]


def _whole(held: _Held) -> LogprobRow:
    logprobs = _logprobs(held)
    return LogprobRow(logprobs, held.token.text if logprobs.text is None else logprobs.text, held.own, held.begin)


def _logprobs(held: _Held) -> TokenLogprobs:
    assert held.token.logprobs is not None
    return held.token.logprobs
