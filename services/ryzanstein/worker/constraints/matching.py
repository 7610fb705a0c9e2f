"""Follows one choice's tokens through its grammar: which may come next, and whether it has ended.

A function of the grammar and of the generated tokens alone, so another node that is given the same
tokens goes on with the same masks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ryzanstein.worker.constraints.table import TokenTable, Words
from ryzanstein.worker.constraints.turns import MaskTurn, MaskTurns

if TYPE_CHECKING:
    from ryzanstein.worker.constraints.guidance import LLMatcher

MOST_BLANKS = 32
"""So many tokens of white space may follow each other while the grammar allows anything else."""
MOST_TOKEN_S = 0.05
"""So much processor time one token of one choice may take; a usual one takes less than a millisecond."""
TOO_SLOW = "the constraint takes too long for each token"
UNSATISFIED = "does not satisfy the constraint"
TOO_COMPLEX = "the constraint became too complex"
NONE_ALLOWED = "no token is allowed by both the constraint and allowed_token_ids"
_REPLAYED = 16
"""Tokens that are replayed at once: the matcher holds the interpreter meanwhile, and the rank's steps wait."""
_MAX_MASKS = 64


class TokenPatience:
    """Whether a grammar is quick enough, for all choices of a group: when one has failed, the others cost no more.

    `moved` is called for each token that took too long, so that nobody takes many of them for a stall.
    `used_s` is the processor time of all masks, or more: see `MaskTurns`.
    """

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        self._moved = moved
        self.used_s = 0.0
        self.failure = ""

    def spent(self, seconds: float) -> None:
        """Takes note of the processor time of one token."""
        self.used_s += seconds
        if seconds > MOST_TOKEN_S:
            self.failure = TOO_SLOW
            self._moved()


class Bits:
    """The tokens with a meaning for every grammar of a model, as masks."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self.blank_ids = frozenset(table.blank_ids())
        self.not_blank = ~table.words(list(self.blank_ids))
        self.not_eos = ~table.words(table.eos)
        self._of: dict[tuple[int, ...], Words] = {}

    def of(self, token_ids: Sequence[int]) -> Words:
        """Returns the mask of these tokens. The last few are kept."""
        key = tuple(token_ids)
        if (words := self._of.get(key)) is None:
            if len(self._of) >= _MAX_MASKS:
                self._of.clear()
            words = self._of[key] = self._table.words(list(key))
        return words


class GrammarState:
    """The state of one choice's grammar after its tokens so far: an engine's `TokenConstraint`.

    `keeps_on`: the model's end-of-text token does not end the answer while anything else may
    follow. `turns` computes the masks of slow choices ahead; None: nobody does. `failure` is what
    ended the use of the grammar; empty if nothing did. `cost_s` is the processor time of the last
    token's mask.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        bits: Bits,
        generated: Sequence[int],
        *,
        keeps_on: bool = False,
        patience: TokenPatience | None = None,
        turns: MaskTurns | None = None,
    ) -> None:
        self.matcher = matcher
        self.cost_s = 0.0
        self._turns = turns
        self._turn: MaskTurn | None = None
        self._bits, self._keeps_on = bits, keeps_on
        self.group = patience or TokenPatience()
        self._num_blanks = 0
        self._stopped = False
        self.num_broken = 0
        self.failure = ""
        if generated:
            self._replay(generated)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow: the answer is complete."""
        return not self.failure and self._stopped

    def accept(self, token_id: int) -> None:
        """Takes the next token of the choice."""
        self.failure = self.failure or self.group.failure
        if self.failure or self._stopped:
            return
        self._num_blanks = self._num_blanks + 1 if token_id in self._bits.blank_ids else 0
        began = time.thread_time()
        if not self.matcher.consume_token(token_id):
            self.failure = f"token {token_id} {UNSATISFIED}"
        self._spent(began)
        self._stopped = self.matcher.is_stopped()
        if self._turns is not None and self._turns.is_slow(self.cost_s) and not (self.failure or self._stopped):
            self._turn = self._turns.begin(self)  # from here on, another thread has the matcher until the turn is done

    def _replay(self, generated: Sequence[int]) -> None:
        """Takes the tokens of earlier attempts, some at once."""
        for first in range(0, len(generated), _REPLAYED):
            self._replay_some(generated[first : first + _REPLAYED])
            self._stopped = self.matcher.is_stopped()
            if self.failure or self._stopped:
                break
        last = (i for i, token_id in enumerate(reversed(generated)) if token_id not in self._bits.blank_ids)
        self._num_blanks = next(last, len(generated))

    def _replay_some(self, some: Sequence[int]) -> None:
        began = time.thread_time()
        num_taken = self.matcher.try_consume_tokens(list(some))
        if num_taken < len(some) and (self.matcher.is_error() or not self.matcher.is_stopped()):
            self.failure = f"token {some[num_taken]} {UNSATISFIED}"
        self.group.spent((time.thread_time() - began) / len(some))
        self.failure = self.failure or self.group.failure

    @property
    def ready(self) -> bool:
        """Whether the next mask is known, or takes no longer than a step may."""
        return self._turn is None or self._turn.done.is_set()

    def write(self, words: Words) -> None:
        """Writes the mask of the tokens that the grammar allows now: what was computed ahead, if anything was."""
        if self._turns is not None and self._turn is not None:
            words[:] = self._turns.finish(self._turn)
            self._turn = None
        else:
            self.compute(words)

    def compute(self, words: Words) -> None:
        """Computes the mask of the tokens that the grammar allows now."""
        self.failure = self.failure or self.group.failure
        if not self.failure:
            began = time.thread_time()
            self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self.cost_s = time.thread_time() - began
            self._spent(began)

    def narrow(self, words: Words, banned: Sequence[int], allowed: Sequence[int] = ()) -> None:
        """Removes tokens from the mask that llguidance computed.

        `allowed` are the only ones that the request allows, empty for all: if none of them is in
        the mask, that is a failure. The others are only preferences, where something else is left:
        `banned` are the stop tokens before min_tokens, and what would complete a bad word.
        """
        if not self.failure and self.matcher.is_error():
            self.failure = TOO_COMPLEX
        if allowed and not self.failure:
            words &= self._bits.of(allowed)
            if not words.any():
                self.failure = NONE_ALLOWED
        if self.failure:
            words.fill(0xFFFFFFFF)  # whatever is drawn: the choice fails
            return
        if banned:
            _keep(words, ~self._bits.of(banned))
        if self._keeps_on:
            _keep(words, self._bits.not_eos)
        if self._num_blanks >= MOST_BLANKS and _keep(words, self._bits.not_blank):
            self.num_broken += 1

    def _spent(self, began: float) -> None:
        self.group.spent(time.thread_time() - began)
        self.failure = self.failure or self.group.failure


def _keep(words: Words, mask: Words) -> bool:
    """Applies a mask unless it leaves nothing; returns whether it removed anything."""
    left = words & mask
    if not left.any() or np.array_equal(left, words):
        return False
    words[:] = left
    return True
