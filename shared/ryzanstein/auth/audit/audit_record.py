"""One operator's act, as it is recorded, and the interface of what keeps records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from ryzanstein.errors import RyzansteinError, unavailable

AUDIT_UNAVAILABLE = "AUDIT_UNAVAILABLE"
MAX_TEXT_CHARS = 1024
DONE, REFUSED, FAILED, UNKNOWN = "done", "refused", "failed", "unknown"

Facts = Mapping[str, str | int | float | bool | None]
"""Some of the state that an act changes."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """An act. It is written before the act with the outcome `unknown`, and after it again, with the same id.

    `actor` is empty where the connection does not say who calls. `via` is the address that the call
    came from. `reason` is that of the error. It has no prompt and no secret.
    """

    id: str
    time: float
    actor: str
    via: str
    method: str
    target: str
    request_id: str
    outcome: str = UNKNOWN
    reason: str = ""
    before: Facts | None = None
    after: Facts | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the record for JSON."""
        return {
            "id": self.id,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds"),
            "actor": self.actor,
            "via": self.via,
            "method": self.method,
            "target": self.target,
            "outcome": self.outcome,
            "reason": self.reason,
            "request_id": self.request_id,
            "before": clipped_facts(self.before),
            "after": clipped_facts(self.after),
        }


class AuditUnwrittenError(RyzansteinError):
    """A record cannot be written; the message says why. It never leaves the auditor."""


class AuditSink(Protocol):
    """Where records are kept."""

    async def write(self, record: AuditRecord) -> None:
        """Returns when the record is on disk. A record of the same id is the same act, further on.

        Raises a RyzansteinError if it cannot be written. It may take long, but
        never blocks the loop.
        """
        ...


def audit_unavailable(why: str) -> RyzansteinError:
    """Returns the refusal of an act that cannot be recorded."""
    return unavailable(AUDIT_UNAVAILABLE, f"the act cannot be recorded, nothing was done: {why}")


def clipped(text: str) -> str:
    """Returns text that fits a record: what is too long for a name or path is no name or path."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"


def clipped_facts(facts: Facts | None) -> dict[str, Any] | None:
    """Returns facts for JSON, with texts that fit a record."""
    if facts is None:
        return None
    return {name: clipped(value) if isinstance(value, str) else value for name, value in facts.items()}
