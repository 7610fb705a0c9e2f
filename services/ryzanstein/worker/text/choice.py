"""The text of one choice: token by token through the detokenizer and the stop strings.

A function of the choice's tokens alone. On another node, `replay` of the tokens that are known brings it to the same state,
so the text of every later token is the same, including what was held back when the first node died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ryzanstein.worker.text.stops import StopScanner
from ryzanstein.worker.text.tokenizer import TextModel

REPLAY_TOKENS = 2048
"""At once: some milliseconds in which the loop does nothing else."""


class ChoiceOutput(NamedTuple):
    """`text` became certain with a token. With `stopped` the answer ended before a stop string and `text` is its end."""

    text: str
    stopped: bool


class ChoiceText:
    """Follows one choice."""

    def __init__(self, model: TextModel, stop: Sequence[str] = ()) -> None:
        self._model = model
        self._detokenizer = model.detokenizer()
        self._at_start = True
        self._scanner = StopScanner(stop)

    def push(self, token_id: int) -> ChoiceOutput:
        """Takes the next token. After a stop string there is no more text."""
        self._at_start = self._at_start and self._model.is_skipped(token_id)
        text = self._detokenizer.push(token_id)
        return ChoiceOutput(self._scanner.push(text) if text else "", self._scanner.stopped)

    def next_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text as it is generated, stop strings included, if it is the next."""
        return self._model.text_bytes(token_id, first=self._at_start)

    def flush(self) -> str:
        """The last token has been pushed: returns all that was held back, up to a stop string if one is in it."""
        return self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._scanner.stopped

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes tokens whose text was sent by an earlier attempt: leaves all as `push` of each would, in far less time.

        May be called again with the next ones. Takes 1 to 4 microseconds a token: see `REPLAY_TOKENS`.
        """
        self._at_start = self._at_start and all(map(self._model.is_skipped, token_ids))
        self._scanner.skip(self._detokenizer.push_all(token_ids))


async def resumed(model: TextModel, stop: Sequence[str], token_ids: Sequence[int]) -> ChoiceText:
    """A choice that goes on after these tokens. Others run in between: an answer may be as long as the context."""
    choice = ChoiceText(model, stop)
    for start in range(0, len(token_ids), REPLAY_TOKENS):
        choice.replay(token_ids[start : start + REPLAY_TOKENS])
        if start + REPLAY_TOKENS < len(token_ids):
            await asyncio.sleep(0)
    return choice
