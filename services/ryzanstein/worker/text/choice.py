"""The text of one choice: token by token through the detokenizer and the stop strings.

The text depends on the choice's tokens alone. On another node, `replay` of the known tokens
restores the same state, so the text of every later token is the same, including what was held back
when the first node died.

An answer ends before the first stop string that would appear. Only what may be the beginning of one is
held back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ryzanstein.worker.text.tokenizer import TextModel


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


REPLAY_TOKENS = 2048
"""Tokens per call: some milliseconds in which the loop does nothing else."""


class TextOptions(NamedTuple):
    """What the text of an answer has.

    `stop` are the strings that end it, `with_stop`: it has the one that did. `with_special`: it has
    special tokens, by name, but the one in `ends` that ends it only `with_stop`. What is complete
    within the first `min_tokens` tokens ends nothing.
    """

    stop: Sequence[str] = ()
    with_stop: bool = False
    with_special: bool = False
    ends: frozenset[int] = frozenset()
    min_tokens: int = 0


PLAIN_TEXT = TextOptions()


class ChoiceOutput(NamedTuple):
    """The text that became certain with a token.

    With `stopped` the answer ended before a stop string, and `text` is its end.
    """

    text: str
    stopped: bool


class ChoiceText:
    """The text state of one choice."""

    def __init__(self, model: TextModel, options: TextOptions = PLAIN_TEXT) -> None:
        self._vocabulary = model.vocabulary(with_special=options.with_special)
        self._detokenizer = self._vocabulary.detokenizer()
        self._hidden = options.ends if options.with_special and not options.with_stop else frozenset()
        self._at_start = True
        self._min_tokens, self._num_tokens = options.min_tokens, 0
        self._scanner = StopScanner(options.stop, with_stop=options.with_stop)

    def push(self, token_id: int) -> ChoiceOutput:
        """Takes the next token. After a stop string there is no more text."""
        self._num_tokens += 1
        if token_id in self._hidden:
            return ChoiceOutput("", self._scanner.stopped)
        self._at_start = self._at_start and self._vocabulary.is_skipped(token_id)
        text = self._detokenizer.push(token_id)
        return ChoiceOutput(self._scanner.push(text, counts=self._stops) if text else "", self._scanner.stopped)

    def next_bytes(self, token_id: int) -> bytes:
        """Returns what the token would add to the text if it were the next.

        This is the generated text, including stop strings.
        """
        return b"" if token_id in self._hidden else self._vocabulary.text_bytes(token_id, first=self._at_start)

    def flush(self) -> str:
        """Returns all that was held back, up to a stop string if it contains one.

        Call it after the last token has been pushed.
        """
        return self._scanner.push(self._detokenizer.flush(), counts=self._stops) + self._scanner.flush()

    @property
    def _stops(self) -> bool:
        """Whether the answer is long enough to end, as in vLLM."""
        return self._num_tokens > self._min_tokens

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string has ended the answer."""
        return self._scanner.stopped

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes tokens whose text an earlier attempt sent.

        The state afterwards is as after `push` of each, in far less time. May be called again with
        the next tokens. Takes 1 to 4 microseconds per token: see `REPLAY_TOKENS`.
        """
        early = max(0, self._min_tokens - self._num_tokens)
        for part in (token_ids[:early], token_ids[early:]):
            if part:
                self._at_start = self._at_start and all(map(self._vocabulary.is_skipped, part))
                self._num_tokens += len(part)
                self._scanner.skip(self._detokenizer.push_all(part), counts=self._stops)


async def resumed(model: TextModel, options: TextOptions, token_ids: Sequence[int]) -> ChoiceText:
    """Returns a choice that continues after these tokens.

    It yields to other tasks in between: an answer may be as long as the context.
    """
    choice = ChoiceText(model, options)
    for start in range(0, len(token_ids), REPLAY_TOKENS):
        choice.replay(token_ids[start : start + REPLAY_TOKENS])
        if start + REPLAY_TOKENS < len(token_ids):
            await asyncio.sleep(0)
    return choice
