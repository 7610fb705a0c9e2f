"""Keeps this router's lease in the journal. Once it expires, others may take its generations."""

from __future__ import annotations

import asyncio

from ryzanstein.router.journal.journal import Journal, JournalUnavailableError, Owner
from ryzanstein.router.journal.metrics import JournalOutage

LEASE_KEEPER = "journal_lease"
_RETRY_S = 0.25


async def keep_lease(journal: Journal, owner: Owner, lease_s: float, outage: JournalOutage) -> None:
    """Renews three times per lease length, until cancelled."""
    while True:
        try:
            await journal.renew(owner)
        except JournalUnavailableError as error:
            outage.begin(error)
            await asyncio.sleep(_RETRY_S)
        else:
            outage.end(LEASE_KEEPER)
            await asyncio.sleep(lease_s / 3)
