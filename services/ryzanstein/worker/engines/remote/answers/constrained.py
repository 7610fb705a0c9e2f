"""The end of a constrained choice: our sampler in the server says it with tokens (see `asking.ConstraintEnd`).

Only it knows whether anything may follow. So a token that ends texts waits for what comes after it, and so does
the last token that was asked for: a constraint may be complete with it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ryzanstein import errors
from ryzanstein.worker.constraints.matching import NONE_ALLOWED, TOO_COMPLEX, TOO_SLOW, UNSATISFIED
from ryzanstein.worker.engines.asking import ConstraintEnd
from ryzanstein.worker.engines.remote.asked import ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, EngineUnreachable

EXTRA_TOKENS = 2
"""What the server is asked for beyond the answer: the escape token and the ending."""
_ENDED = (ConstraintEnd.DRAWN, ConstraintEnd.COMPLETE)
_FAILURES = {
    ConstraintEnd.TOO_SLOW: TOO_SLOW,
    ConstraintEnd.UNSATISFIED: f"a token {UNSATISFIED}",
    ConstraintEnd.TOO_COMPLEX: TOO_COMPLEX,
    ConstraintEnd.NONE_ALLOWED: NONE_ALLOWED,
    ConstraintEnd.NAMES_THE_END: "the constraint names the token that ends texts",
}


async def constrained(
    parts: AsyncGenerator[ComputedPart, None], escape: int, max_tokens: int
) -> AsyncGenerator[ComputedPart, None]:
    """Yields the parts of a choice of at most `max_tokens`, without what only says how it ends.

    The last part has its last token and `finish`. Raises RyzansteinError where the constraint could not be followed, and
    EngineFault where the sampler cannot do it.
    """
    ends = _Ends(escape, max_tokens)
    async with aclosing(parts):
        async for part in parts:
            tokens = [each for token in part.tokens for each in ends.take(token)]
            finish = ends.finish or (ends.rest(tokens) if part.finish else "")
            yield replace(part, tokens=tokens, finish=finish)
            if finish:
                return


class _Ends:
    """Finds the end. `finish`: how the choice has ended, "" before."""

    def __init__(self, escape: int, max_tokens: int) -> None:
        self._escape, self._room = escape, max_tokens
        self._held: list[ComputedToken] = []
        self._escaped = False
        self.finish = ""

    def take(self, token: ComputedToken) -> list[ComputedToken]:
        """Takes the next token; returns those that are certainly a part of the answer."""
        if self.finish:
            return []
        if self._escaped:
            return self._end(token.token_id)
        if token.token_id == self._escape:
            self._escaped = True
            self._held.append(token)
            return []
        if self._held:  # the last one that was asked for: the constraint is not complete with it
            self.finish = "length"
            return self._released()
        self._room -= 1
        if self._room:
            return [token]
        self._held.append(token)
        return []

    def rest(self, tokens: list[ComputedToken]) -> str:
        """Adds what is held when the server has ended, for want of room in its context; returns how the choice ended."""
        tokens += self._released()
        return "stop" if self._escaped else "length"

    def _end(self, code: int) -> list[ComputedToken]:
        """Ends the choice, of which the escape token is held, and the last one that was asked for if that came before."""
        if self._room == 0 and code != ConstraintEnd.COMPLETE:
            self.finish = "length"  # whatever would have come next
            return self._released()[:-1]
        if code not in _ENDED:
            raise _failure(code)
        self.finish = "stop"
        held = self._released()
        return held if code == ConstraintEnd.DRAWN else held[:-1]

    def _released(self) -> list[ComputedToken]:
        held, self._held = self._held, []
        return held


def _failure(code: int) -> Exception:
    if code == ConstraintEnd.NOT_FINITE:
        return errors.logits_not_finite("the model's logits are not finite")
    if code == ConstraintEnd.NOT_COMPILED:  # the node's own judge has compiled it, so it is the table that is missing
        return EngineUnreachable("its sampler does not know the model's tokens: it was restarted")
    if (text := _FAILURES.get(code)) is None:  # type: ignore[call-overload]
        return EngineProtocolError(f"the sampler in the engine ended a choice with {code}")
    return errors.constraint_failed(text)
