"""The text of one choice: token by token through the detokenizer and the stop strings.

The text depends on the choice's tokens alone. On another node, `replay` of the known tokens
restores the same state, so the text of every later token is the same, including what was held back
when the first node died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ryzanstein.worker.text.stops import StopScanner
from ryzanstein.worker.text.tokenizer import TextModel

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
