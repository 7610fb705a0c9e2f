"""What a journal of generations does, whatever keeps it: append what happened, and hand a generation to exactly one new owner.

A generation has an owner and an epoch. Whoever writes says the epoch that it knows; one that is too old is fenced off. Taking a
generation over is a compare-and-set of the epoch. Knows no tokens: requests and batches are bytes (`encoding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# From the claim of a key to the opening of its generation: the session's claim and history lie between.
KEY_HOLD_S = 5.0


class JournalUnavailableError(Exception):
    """The store does not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A running router: `owner_id` is another one after each start, `address` is host:port of its gRPC face."""

    owner_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Head:
    """Who has a generation."""

    owner: Owner
    epoch: int


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """All that is known of a generation. Batches may overlap, see `JournalBatch`."""

    epoch: int
    request: bytes
    batches: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Append:
    """`request` opens the generation, None continues it. An empty batch only keeps it from expiring."""

    generation_id: str
    epoch: int
    batch: bytes
    request: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """A generation that has a client's key. `body`: a digest of the request that it was claimed with. `begun`: the generation
    is in the journal."""

    generation_id: str
    body: bytes
    begun: bool = False


class AppendOutcome(Enum):
    """What became of an append."""

    WRITTEN = "written"
    FENCED = "fenced"
    """Another router owns the generation."""
    MISSING = "missing"
    """There is no such generation, and the append does not open it."""


class Journal(Protocol):
    """Keeps generations until they expire: a retention after the last append. No method blocks the event loop; each raises
    `JournalUnavailableError`."""

    async def write(self, owner: Owner, appends: Sequence[Append]) -> list[AppendOutcome]:
        """One outcome for each append. Repeating a write that may have happened is harmless."""
        ...

    async def remove(self, generations: Sequence[tuple[str, int]]) -> None:
        """Forgets generations (id, epoch), where nobody has taken them over."""
        ...

    async def head(self, generation_id: str) -> Head | None:
        """None: unknown or expired."""
        ...

    async def take(self, generation_id: str, epoch: int, owner: Owner) -> JournalRecord | None:
        """The generation with epoch + 1, its new owner's. None: its epoch is not `epoch` any more, or it is gone."""
        ...

    async def claim_key(self, key: str, claim: KeyClaim, keep_s: float) -> KeyClaim | None:
        """The key is this generation's: None. Otherwise whose it is: another generation's that is in the journal, or that
        claimed it less than `KEY_HOLD_S` ago and may yet be opened. The claim is forgotten after `keep_s` at the latest."""
        ...

    async def free_key(self, key: str, generation_id: str) -> None:
        """Nobody's, if it is still this generation's."""
        ...

    async def renew(self, owner: Owner) -> None:
        """The owner lives, for a lease from now. Also clears away what has expired."""
        ...

    async def find(self, owner_id: str) -> Owner | None:
        """Where the owner is, while its lease holds."""
        ...

    async def resign(self, owner: Owner) -> None:
        """Ends the lease: its generations are free to be taken."""
        ...

    async def close(self) -> None: ...
