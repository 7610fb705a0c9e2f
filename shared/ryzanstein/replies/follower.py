"""Follows a generation's deltas for one reader, and reads what they say."""

from __future__ import annotations

from ryzanstein.generation.events import Delta, Finished, Started
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.replies.reader import ReplyReader, Said, shown_reason


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

    @property
    def active(self) -> bool:
        """Whether the answers have more than content, and are to be read from their beginning."""
        return self.format is not None

    def num_seen(self, delta: Delta) -> int:
        """Returns how many of a delta's tokens the reader has seen."""
        return min(len(delta.tokens), max(0, self._seen.get(delta.choice, 0) - delta.first_index))

    def said(self, delta: Delta) -> Said:
        """Returns what became certain with the tokens that the reader has not seen."""
        num_seen = self.num_seen(delta)
        reader = self._reader(delta.choice)
        reader.push(_text(delta, 0, num_seen))
        return Said.of(reader.push(_text(delta, num_seen, None)))

    def ended(self, finished: Finished) -> tuple[Said, FinishReason]:
        """Returns what became certain with the end of a choice, and how that is shown."""
        if not self.active:
            return Said(), finished.reason
        reader = self._reader(finished.choice)
        said = Said.of(reader.end())
        return said, shown_reason(self.format, reader.num_calls, finished.reason)

    def _reader(self, choice: int) -> ReplyReader:
        if choice not in self._readers:
            assert self.format is not None
            self._readers[choice] = ReplyReader(self.format, self._generation_id, choice)
        return self._readers[choice]


def _text(delta: Delta, start: int, end: int | None) -> str:
    return "".join(token.text for token in delta.tokens[start:end])
