"""Clients' keys in the journal, where every router that shares it finds them."""

from __future__ import annotations

import asyncio

from ryzanstein import errors
from ryzanstein.generation.request import RequestKey
from ryzanstein.router.generations.idempotency import KeyHolder
from ryzanstein.router.journal.journal import KEY_HOLD_S, Journal, JournalUnavailableError, KeyClaim
from ryzanstein.router.journal.metrics import JournalOutage

_WAIT_S = 1.0


class JournalKeys:
    """Implements `SharedKeys`.

    A key that cannot be checked and written in time is refused: another router may have it.
    """

    hold_s = KEY_HOLD_S

    def __init__(self, journal: Journal, retention_s: float, outage: JournalOutage) -> None:
        """`retention_s`: how long a generation's entry outlives its last append."""
        self._journal = journal
        self._retention_s = retention_s
        self._outage = outage

    async def claim(self, key: RequestKey, generation_id: str, lasts_s: float) -> KeyHolder | None:
        """Claims the key, or returns its holder.

        Raises UNAVAILABLE JOURNAL_UNAVAILABLE when the journal does not take it within a second;
        during an outage it raises at once.
        """
        if self._outage.lasts:
            raise _unavailable()
        claim = KeyClaim(generation_id, key.body)
        try:
            async with asyncio.timeout(_WAIT_S):
                held = await self._journal.claim_key(key.name, claim, max(0.0, lasts_s) + self._retention_s)
        except (JournalUnavailableError, TimeoutError) as error:
            self._fail(error)
            raise _unavailable() from error
        return None if held is None else KeyHolder(held.generation_id, held.body, held.begun)

    async def free(self, key: RequestKey, generation_id: str) -> None:
        """Frees the key. If that fails, it is free once its generation has left the journal."""
        if self._outage.lasts:
            return
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._journal.free_key(key.name, generation_id)
        except (JournalUnavailableError, TimeoutError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, JournalUnavailableError):
            self._outage.begin(error)


def _unavailable() -> errors.RyzansteinError:
    message = "the journal is unavailable and cannot store the idempotency key; retry with the same key"
    return errors.unavailable("JOURNAL_UNAVAILABLE", message)
