"""What the reader of a generation is told, piece by piece: each choice begins, speaks, and ends.

Every face that streams text stands on this: OpenAI's chunks (`chunks`), and any other form. It
knows positions and which text and log probabilities are certain, but no JSON and no framing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ryzanstein.generation.tokens import Delta, Finished, FinishReason, GenerationEvent, Started, Usage
from ryzanstein.replies.follower import ReplyFollower
from ryzanstein.replies.reader import ReplyDelta
from ryzanstein.router.faces.openai.answers.alignment import Alignment, LogprobRow
from ryzanstein.router.faces.openai.answers.cursor import Cursor


class Opening(NamedTuple):
    """A choice begins: once, before anything else of it."""

    choice: int


class Speech(NamedTuple):
    """What a choice says anew, and the log probabilities that became certain. One of both may be empty."""

    choice: int
    delta: ReplyDelta
    rows: Sequence[LogprobRow]


class Ending(NamedTuple):
    """A choice ends. `rows` are those that a stop string cut; `said` became certain with the end."""

    choice: int
    reason: FinishReason
    rows: Sequence[LogprobRow]
    delta: ReplyDelta


Piece = Opening | Speech | Ending


class Pieces:
    """Converts the events that one reader follows to pieces, each of them once.

    When a piece is yielded, the cursor is the position of a reader that has it.
    """

    def __init__(self, cursor: Cursor, started: Started) -> None:
        self.cursor = cursor
        self._replies = ReplyFollower(started, cursor.from_index)
        self.usage: Usage | None = None
        """The usage of all choices, once one has ended."""
        self._seen = cursor.from_index
        self._alignments: defaultdict[int, Alignment] = defaultdict(Alignment)

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens of all choices are reasoning."""
        return self._replies.num_reasoning

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
        if delta.tokens[0].logprobs is not None or self._replies.active:
            yield from self._from_the_beginning(delta)
            return
        self.cursor.advance(delta.choice, delta.first_index + len(delta.tokens))
        if text := delta.text:
            yield Speech(delta.choice, ReplyDelta(text), ())

    def _from_the_beginning(self, delta: Delta) -> Iterator[Speech]:
        """Yields the piece of a Delta of a choice that is read from its first token.

        That is one with log probabilities, or with more than content. Tokens that the reader has
        seen only prepare what later ones say.
        """
        num_seen, rows = self._replies.num_seen(delta), []
        if delta.tokens[0].logprobs is not None:
            alignment = self._alignments[delta.choice]
            for token in delta.tokens[:num_seen]:
                deque(alignment.push(token), maxlen=0)
            rows = [row for token in delta.tokens[num_seen:] for row in alignment.push(token)]
        if self._replies.active:
            reply = self._replies.read(delta)
        else:
            reply = ReplyDelta("".join(token.text for token in delta.tokens[num_seen:]))
        if num_seen < len(delta.tokens):
            self.cursor.advance(delta.choice, delta.first_index + len(delta.tokens))
            if reply or rows:
                yield Speech(delta.choice, reply, rows)

    def _ending(self, finished: Finished) -> Iterator[Ending]:
        if self.cursor.ended(finished.choice):
            return
        self.cursor.end(finished.choice)
        rows = list(self._alignments.pop(finished.choice, Alignment()).end())
        reply, reason = self._replies.ended(finished)
        yield Ending(finished.choice, reason, rows, reply)
