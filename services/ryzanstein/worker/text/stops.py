"""Stop strings in a stream of text: the answer ends before the first that would appear.

Holds back only what may be the beginning of a stop string. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """A stop string as an automaton (Knuth, Morris, Pratt 1977).

    `matched` characters of it end the text so far.
    """

    __slots__ = ("_failure", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._failure = [0] * len(text)
        self.matched = 0
        for i in range(1, len(text)):
            self._failure[i] = self._next(self._failure[i - 1], text[i])

    def feed(self, char: str) -> bool:
        """Returns whether the stop string is complete with this character."""
        if self.matched == len(self.text):  # it was complete where it did not count
            self.forget()
        self.matched = self._next(self.matched, char)
        return self.matched == len(self.text)

    def forget(self) -> None:
        """Goes on as if the stop string were not complete: its end may be the beginning of the next."""
        if self.matched == len(self.text):
            self.matched = self._failure[-1]

    def restart(self, tail: str) -> int:
        """Returns the number of characters matched at the end of a text.

        `tail` is the end of that text, or all of it that could matter.
        """
        self.matched = 0
        for char in tail:
            self.feed(char)
        self.forget()
        return self.matched

    def _next(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._failure[matched - 1]
        return matched + 1 if self.text[matched] == char else 0


class StopScanner:
    """A scanner that follows one choice's text.

    Of several stop strings the first to be complete counts, wherever tokens begin and end; of those
    complete at the same character, the longest. `with_stop`: the text ends with it, not before it.
    Text that is pushed with `counts` False completes none.
    """

    def __init__(self, stop: Sequence[str], *, with_stop: bool = False) -> None:
        self._with_stop = with_stop
        self._patterns = [_Pattern(text) for text in stop]
        self._held = ""
        self.stopped = False

    def push(self, text: str, *, counts: bool = True) -> str:
        """Returns the text that is now certain to be part of the answer and is not returned yet."""
        if self.stopped or not self._patterns:
            return "" if self.stopped else text
        buffer = self._held + text
        begin = len(self._held)
        for i, char in enumerate(text, begin + 1):
            ended = [pattern.matched for pattern in self._patterns if pattern.feed(char)]
            if not counts:
                for pattern in self._patterns:
                    pattern.forget()
            elif ended:
                self.stopped = True
                self._held = ""
                return buffer[: i if self._with_stop else i - max(ended)]
        certain = len(buffer) - max(pattern.matched for pattern in self._patterns)
        self._held = buffer[certain:]
        return buffer[:certain]

    def skip(self, text: str, *, counts: bool = True) -> None:
        """Takes text as `push` does, for text that no reader waits for; returns nothing.

        The text is searched as a whole instead of character by character.
        """
        if self.stopped or not self._patterns:
            return
        known = self._held + text
        held = len(self._held)
        # What ends in the held text was complete where it did not count.
        self.stopped = counts and any(
            known.find(pattern.text, max(0, held - len(pattern.text) + 1)) >= 0 for pattern in self._patterns
        )
        # What is matched of an incomplete stop string is shorter than it.
        longest = max(len(pattern.text) for pattern in self._patterns)
        tail = "" if self.stopped else known[max(0, len(known) - longest + 1) :]
        matched = max(pattern.restart(tail) for pattern in self._patterns)
        self._held = tail[len(tail) - matched :]

    def flush(self) -> str:
        """Returns what was held back: the text is complete, so it is part of the answer."""
        held, self._held = self._held, ""
        return held
