"""The interface of a journal of generations: appends, and transfer to exactly one new owner.

A generation has an owner and an epoch. Every writer states the epoch that it knows; a writer whose
epoch is too old is fenced off. Taking a generation over is a compare-and-set of the epoch. The
journal knows no tokens: requests and batches are bytes (`encoding`).

A router keeps a lease in the journal. Once it expires, others may take its generations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

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


# The time from the claim of a key to the opening of its generation. In between, the session is
# claimed and its history is read.
KEY_HOLD_S = 5.0
# How long it is known that a generation has expired, and not been removed.
EXPIRED_KEEP_S = 3600.0
# How long the address of an owner whose lease has expired is known.
LAST_KNOWN_KEEP_S = 3600.0


class JournalUnavailableError(Exception):
    """The store does not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A running router.

    `owner_id` changes with each start; `address` is host:port of its gRPC face for other routers. In the
    lease of a router that is draining it is empty. `public` is where clients reach it; it is compared
    nowhere, and empty where that is not known.
    """

    owner_id: str
    address: str
    public: str = field(default="", compare=False)

    @property
    def router_id(self) -> str:
        """The name of the router, which a restart does not change."""
        return self.owner_id.rpartition("/")[0] or self.owner_id

    @property
    def instance_id(self) -> str:
        """What a restart changes; empty for a router without a journal."""
        name, _, instance_id = self.owner_id.rpartition("/")
        return instance_id if name else ""


@dataclass(frozen=True, slots=True)
class Head:
    """The owner of a generation, and its epoch."""

    owner: Owner
    epoch: int


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """All that is known of a generation. Batches may overlap, see `JournalBatch`.

    `age_s`: the seconds since the last append, by the store's clock.
    """

    epoch: int
    request: bytes
    batches: tuple[bytes, ...]
    age_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Append:
    """One write to a generation.

    `request` opens the generation, None continues it. An empty batch only keeps it from expiring.
    """

    generation_id: str
    epoch: int
    batch: bytes
    request: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """A generation that has a client's key.

    `body`: a digest of the request that it was claimed with. `begun`: the generation is in the
    journal.
    """

    generation_id: str
    body: bytes
    begun: bool = False


class AppendOutcome(Enum):
    """The result of an append."""

    WRITTEN = "written"
    FENCED = "fenced"
    """Another router owns the generation."""
    MISSING = "missing"
    """There is no such generation, and the append does not open it."""
    EXPIRED = "expired"
    """As MISSING, because it expired: no router has taken it over."""


class Journal(Protocol):
    """Keeps generations until they expire: a retention after the last append.

    No method blocks the event loop; each raises `JournalUnavailableError`.
    """

    async def write(self, owner: Owner, appends: Sequence[Append]) -> list[AppendOutcome]:
        """Writes the appends and returns one outcome for each.

        It is safe to repeat a write that may have happened.
        """
        ...

    async def remove(self, generations: Sequence[tuple[str, int]]) -> None:
        """Removes generations (id, epoch), unless another router has taken them over."""
        ...

    async def head(self, generation_id: str) -> Head | None:
        """Returns the owner and epoch; None if the generation is unknown or expired."""
        ...

    async def take(self, generation_id: str, epoch: int, owner: Owner) -> JournalRecord | None:
        """Takes the generation over and returns it; it then has epoch + 1 and the new owner.

        None: its epoch is no longer `epoch`, or it is gone.
        """
        ...

    async def claim_key(self, key: str, claim: KeyClaim, keep_s: float) -> KeyClaim | None:
        """Claims the key for this generation and returns None, or returns the claim of another one.

        The other generation is in the journal, or claimed the key less than `KEY_HOLD_S` ago and
        may still be opened. The claim is forgotten after `keep_s` at the latest.
        """
        ...

    async def free_key(self, key: str, generation_id: str) -> None:
        """Frees the key if it is still this generation's."""
        ...

    async def renew(self, owner: Owner) -> None:
        """Renews the owner's lease, from now. Also removes what has expired."""
        ...

    async def find(self, owner_id: str) -> Owner | None:
        """Returns the owner while its lease is valid."""
        ...

    async def last_known(self, owner_id: str) -> Owner | None:
        """Returns the owner as of its last lease, also for `LAST_KNOWN_KEEP_S` after that expired.

        None when it resigned. Such an owner may be dead, or may only have lost the store.
        """
        ...

    async def owners(self) -> list[Owner]:
        """Returns the owners with a valid lease, the last to renew it first. Those of an earlier release are missing."""
        ...

    async def resign(self, owner: Owner) -> None:
        """Ends the lease: the owner's generations may be taken over."""
        ...

    async def close(self) -> None: ...
