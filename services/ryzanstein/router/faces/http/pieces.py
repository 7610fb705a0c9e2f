"""What the reader of a generation is told, piece by piece: each choice begins, speaks, and ends.

Every face that streams text stands on this: OpenAI's chunks (`chunks`), and any other form. It
knows positions and which text and log probabilities are certain, but no JSON and no framing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ryzanstein.generation import Delta, Finished, FinishReason, GenerationEvent, Usage
from ryzanstein.router.faces.http.alignment import Alignment, LogprobRow
from ryzanstein.router.faces.http.cursor import Cursor


class Opening(NamedTuple):
    """A choice begins: once, before anything else of it."""

    choice: int


class Speech(NamedTuple):
    """New text of a choice, and the log probabilities that became certain. One of both may be empty."""

    choice: int
    text: str
    rows: Sequence[LogprobRow]


class Ending(NamedTuple):
    """A choice ends. `rows` are those that a stop string cut."""

    choice: int
    reason: FinishReason
    rows: Sequence[LogprobRow]


Piece = Opening | Speech | Ending


class Pieces:
    """Converts the events that one reader follows to pieces, each of them once.

    When a piece is yielded, the cursor is the position of a reader that has it.
    """

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.usage: Usage | None = None
        """The usage of all choices, once one has ended."""
        self._seen = cursor.from_index
        self._alignments: defaultdict[int, Alignment] = defaultdict(Alignment)

    def of(self, event: GenerationEvent) -> Iterator[Piece]:
        """Yields the pieces of an event; none for tokens whose text is not certain yet."""
        match event:
            case Delta():
                yield from self._opening(event.choice)
                yield from self._speech(event)
            case Finished():
                self.usage = event.usage
                yield from self._opening(event.choice)
                yield from self._ending(event)

    def _opening(self, choice: int) -> Iterator[Opening]:
        if not self.cursor.began(choice):
            self.cursor.begin(choice)
            yield Opening(choice)

    def _speech(self, delta: Delta) -> Iterator[Speech]:
        if delta.tokens[0].logprobs is not None:
            yield from self._with_logprobs(delta)
            return
        self.cursor.advance(delta.choice, delta.first_index + len(delta.tokens))
        if text := delta.text:
            yield Speech(delta.choice, text, ())

    def _with_logprobs(self, delta: Delta) -> Iterator[Speech]:
        """Yields the piece of a Delta with log probabilities.

        Tokens that the reader has seen only prepare the alignment of later ones.
        """
        alignment = self._alignments[delta.choice]
        num_seen = max(0, self._seen.get(delta.choice, 0) - delta.first_index)
        for token in delta.tokens[:num_seen]:
            deque(alignment.push(token), maxlen=0)
        tokens = delta.tokens[num_seen:]
        if not tokens:
            return
        self.cursor.advance(delta.choice, delta.first_index + len(delta.tokens))
        text = "".join(token.text for token in tokens)
        rows = [row for token in tokens for row in alignment.push(token)]
        if text or rows:
            yield Speech(delta.choice, text, rows)

    def _ending(self, finished: Finished) -> Iterator[Ending]:
        if self.cursor.ended(finished.choice):
            return
        self.cursor.end(finished.choice)
        rows = list(self._alignments.pop(finished.choice, Alignment()).end())
        yield Ending(finished.choice, finished.reason, rows)
