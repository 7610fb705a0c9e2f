"""Follows a generation's deltas for one reader, and reads what they say."""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.generation.tokens import Delta, Finished, FinishReason, Started, Token
from ryzanstein.replies.parts import Part
from ryzanstein.replies.reader import ReplyDelta, ReplyReader, visible_reason


class ReplyFollower:
    """Reads the answers of one generation, each from its first token.

    A reader that has seen some tokens is given them all again: those that it has seen are only
    read. `seen` are the next indices that it wants.
    """

    def __init__(self, started: Started, seen: dict[int, int] | None = None) -> None:
        self.format = started.reply
        self._generation_id = started.generation_id
        self._seen = seen or {}
        self._readers: dict[int, ReplyReader] = {}
        self.num_reasoning = 0
        """How many of the tokens so far are reasoning, its end not counted."""

    @property
    def active(self) -> bool:
        """Whether the answers have more than content, and are to be read from their beginning."""
        return self.format is not None

    def num_seen(self, delta: Delta) -> int:
        """Returns how many of a delta's tokens the reader has seen."""
        return min(len(delta.tokens), max(0, self._seen.get(delta.choice, 0) - delta.first_index))

    def read(self, delta: Delta) -> ReplyDelta:
        """Returns what became certain with the tokens that the reader has not seen."""
        num_seen = self.num_seen(delta)
        reader = self._reader(delta.choice)
        self._push(reader, delta.tokens[:num_seen])
        return ReplyDelta.of(self._push(reader, delta.tokens[num_seen:]))

    def _push(self, reader: ReplyReader, tokens: Sequence[Token]) -> list[Part]:
        """Reads tokens: one by one as long as they may be reasoning, to count them."""
        parts: list[Part] = []
        num_read = 0
        for token in tokens:
            if reader.thinking is False:
                break
            parts += reader.push(token.text)
            self.num_reasoning += bool(reader.thinking)
            num_read += 1
        return [*parts, *reader.push("".join(token.text for token in tokens[num_read:]))]

    def ended(self, finished: Finished) -> tuple[ReplyDelta, FinishReason]:
        """Returns what became certain with the end of a choice, and how that is shown."""
        if not self.active:
            return ReplyDelta(), finished.reason
        reader = self._reader(finished.choice)
        part = ReplyDelta.of(reader.end())
        return part, visible_reason(self.format, reader.num_calls, finished.reason)

    def _reader(self, choice: int) -> ReplyReader:
        if choice not in self._readers:
            assert self.format is not None
            self._readers[choice] = ReplyReader(self.format, self._generation_id, choice)
        return self._readers[choice]
