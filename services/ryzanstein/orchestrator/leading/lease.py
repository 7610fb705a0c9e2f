"""The lease that says which orchestrator leads: a record in a service that compares and sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The times of a lease, in seconds.

    A leader acts for `act_s` from the start of its last renewal, and what it said is void `act_s`
    later; a standby takes the lease when nothing changed for `lease_s`, and then waits `keep_s` before
    it moves models: act_s + act_s < lease_s + keep_s. Clocks may run at rates that differ by 15 %.
    """

    lease_s: float = 5.0
    act_s: float = 3.0
    renew_s: float = 1.0
    """Between two renewals; also how long one may take."""
    poll_s: float = 0.5
    """Between two looks of a standby."""
    keep_s: float = 2.0
    keep_released_s: float = 3.5
    """The same after a leader that gave the lease back: nothing was waited for before."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the service holds. Every write changes `version`; empty: there is no record.

    `holder` is the id of the leader, empty when it gave the lease back; `address` is where it is reached.
    """

    version: str = ""
    holder: str = ""
    address: str = ""
    epoch: int = 0


class LeaseUnavailableError(Exception):
    """The service of the lease does not answer, or not as it should. Whether a write was done is unknown."""


class LeaseProvider(Protocol):
    """A service that holds the lease. Methods raise LeaseUnavailableError."""

    async def read(self) -> LeaseRecord:
        """Returns the record."""
        ...

    async def replace(self, seen: LeaseRecord, wanted: LeaseRecord) -> LeaseRecord | None:
        """Writes a record in place of the one that was seen; returns it with its version. None: it is not the same any more."""
        ...

    async def close(self) -> None: ...
