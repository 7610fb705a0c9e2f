"""The text of an answer as it arrives, for parsers that are generators.

A parser yields wherever it needs more text to decide, and goes on when there is more. What it has
decided after some text depends on that text alone, not on the pieces in which it came. No pattern
backtracks.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

_Result = TypeVar("_Result")

Step = Generator[None, None, _Result]
"""A step of a parser: it yields for more text, and returns what it found."""

_SPACE = re.compile(r"[ \t\r\n]*")
MAX_HELD_CHARS = 16_384
"""So much text may wait for the decision whether it is a call. A longer one is content."""


class Source:
    """A text with a position. `mark` keeps what follows for `since_mark`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self.ended = False

    def add(self, text: str) -> None:
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + text
        self._at -= keep
        if self._mark is not None:
            self._mark = 0

    def mark(self, before: int = 0) -> None:
        """Keeps the text from `before` characters before the position on."""
        self._mark = self._at - before

    def since_mark(self) -> str:
        """Returns the text from the mark to the position, and removes the mark."""
        start = self._at if self._mark is None else self._mark
        self._mark = None
        return self._text[start : self._at]

    def unmark(self) -> None:
        self._mark = None

    def overrun(self) -> bool:
        """Returns whether too much waits since the mark; then the position is where that became so."""
        if self._mark is None or self._at - self._mark <= MAX_HELD_CHARS:
            return False
        self._at = self._mark + MAX_HELD_CHARS
        return True

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left of what has arrived."""
        return self._at == len(self._text)

    def peek(self) -> Step[str]:
        """Returns the next character without taking it; empty at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, num_chars: int = 1) -> None:
        """Takes characters that were peeked at; a negative number gives some back."""
        self._at = min(self._at + num_chars, len(self._text))

    def space(self) -> Step[None]:
        """Takes white space, since a mark no more than may wait."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self.overrun():
                return
            if self._at < len(self._text) or self.ended:
                return
            yield

    def literal(self, *texts: str) -> Step[str]:
        """Takes the text that comes next, if it is one of these, and returns it; otherwise returns "".

        Of two that begin alike the longer one counts.
        """
        while True:
            rest = self._text[self._at : self._at + max(map(len, texts))]
            if self.ended or not any(len(text) > len(rest) and text.startswith(rest) for text in texts):
                longest = max((text for text in texts if rest.startswith(text)), key=len, default="")
                self._at += len(longest)
                return longest
            yield

    def close(self, *texts: str) -> Step[None]:
        """Takes the closing text that comes next, if it is one of these; of one that the end has cut, what there is."""
        found = yield from self.literal(*texts)
        rest = self._text[self._at :]
        if not found and self.ended and any(text.startswith(rest) for text in texts):
            self._at = len(self._text)

    def until(self, pattern: re.Pattern[str], most: int) -> Step[str | None]:
        """Takes the text before a character that matches the pattern, or before the end.

        None, and nothing taken, if there are more than `most` characters before it.
        """
        while True:
            found = pattern.search(self._text, self._at, self._at + most + 1)
            end = found.start() if found else len(self._text)
            if end - self._at > most:
                return None
            if found or self.ended:
                text, self._at = self._text[self._at : end], end
                return text
            yield

    def before(self, markers: Sequence[str], pattern: re.Pattern[str]) -> tuple[str, str, bool]:
        """Takes what certainly comes before the next of these markers, and the marker if it is there.

        Returns the text, the marker or "", and whether the text has ended. `pattern` finds any of
        the markers.
        """
        found = pattern.search(self._text, self._at)
        if found is not None:
            text, self._at = self._text[self._at : found.start()], found.end()
            return text, found[0], False
        end = len(self._text) if self.ended else len(self._text) - self._begun(markers)
        text, self._at = self._text[self._at : end], end
        return text, "", self.ended

    def run(self, pattern: re.Pattern[str]) -> str:
        """Takes the characters here that a run of one class of them matches; may be empty."""
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0]

    def _begun(self, markers: Sequence[str]) -> int:
        """Returns how many characters at the end may begin a marker."""
        longest = min(max(map(len, markers), default=1) - 1, len(self._text) - self._at)
        for length in range(longest, 0, -1):
            tail = self._text[len(self._text) - length :]
            if any(marker.startswith(tail) for marker in markers):
                return length
        return 0
