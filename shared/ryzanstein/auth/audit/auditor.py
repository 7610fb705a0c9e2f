"""Records operators' acts: the intent before the act, the outcome after it.

An act whose intent cannot be written is refused, and nothing is done. Writing is bounded in time, and
happens beside the event loop. An outcome that cannot be written is counted, and the act stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter

from ryzanstein.auth.audit.actor import actor_of, address_of
from ryzanstein.auth.audit.audit_record import (
    AUDIT_UNAVAILABLE,
    DONE,
    FAILED,
    REFUSED,
    AuditRecord,
    AuditSink,
    AuditUnwrittenError,
    Facts,
    audit_unavailable,
    clipped,
)
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.process.background import Background

log = structlog.get_logger(__name__)
# Whatever the level of the log is.
audit_log = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))

WRITE_S = 2.0
MOST_WAITING = 64
_FAILED_CODES = frozenset({Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.UNAVAILABLE, Code.CANCELLED})


def audit_failures(service: str, registry: CollectorRegistry) -> Counter:
    """Returns the metric of one process, with both of its values from the start."""
    counter = Counter(
        f"ryzanstein_{service}_audit_failures_total",
        "Records of operators' acts that could not be written; intent: the act was refused, outcome: it was done.",
        ["part"],
        registry=registry,
    )
    for part in ("intent", "outcome"):
        counter.labels(part)
    return counter


@dataclass(slots=True)
class Act:
    """An act that runs. What does it sets `after`."""

    after: Facts | None = None


class Auditor:
    """Writes records to the log and to each sink. Several acts may run at once, also on one target."""

    def __init__(
        self, background: Background, failures: Counter, sinks: Sequence[AuditSink] = (), *, write_s: float = WRITE_S
    ) -> None:
        self._background, self._failures, self._sinks, self._write_s = background, failures, sinks, write_s
        self._waiting = 0
        self._late: dict[AuditSink, asyncio.Task[None]] = {}
        """Of each sink a write that takes too long, until it ends."""

    @asynccontextmanager
    async def act(self, context: Any, method: str, target: str, before: Facts | None = None) -> AsyncIterator[Act]:
        """Runs an act. Raises UNAVAILABLE (AUDIT_UNAVAILABLE) before it if its intent cannot be written.

        A caller that goes away leaves the outcome `unknown`: what it asked for may go on.
        """
        request_id = str(structlog.contextvars.get_contextvars().get("request_id", ""))
        who, via, now = actor_of(context), address_of(context), time.time()
        record = AuditRecord(uuid.uuid4().hex, now, who, via, method, clipped(target), request_id, before=before)
        await self._intend(record)
        act = Act()
        try:
            yield act
        except RyzansteinError as error:
            outcome = FAILED if error.code in _FAILED_CODES else REFUSED
            await self._conclude(replace(record, outcome=outcome, reason=error.reason))
            raise
        except Exception:
            await self._conclude(replace(record, outcome=FAILED, reason="INTERNAL"))
            raise
        except BaseException:
            self._background.once("audit", self._write_outcome(replace(record, reason="CANCELLED")))
            raise
        await self._conclude(replace(record, outcome=DONE, after=act.after))

    async def _intend(self, record: AuditRecord) -> None:
        """Writes the intent. Otherwise the record says, where it can be written, that the act was refused."""
        audit_log.info("audit intent", audit=True, **record.fields())
        begun = False
        try:
            self._check_free()
            begun = True
            self._waiting += 1
            try:
                await asyncio.gather(*(self._written(sink, record) for sink in self._sinks))
            finally:
                self._waiting -= 1
        except Exception as error:
            self._failures.labels("intent").inc()
            log.error("act refused, it cannot be recorded", method=record.method, error=str(error))
            self._withdraw(replace(record, outcome=REFUSED, reason=AUDIT_UNAVAILABLE), begun)
            raise audit_unavailable(str(error)) from error
        except BaseException:
            self._withdraw(replace(record, outcome=REFUSED, reason="CANCELLED"), begun)
            raise

    def _check_free(self) -> None:
        """Raises if a record would wait: for one that does not get written, or for too many others."""
        if any(not late.done() for late in self._late.values()):
            raise AuditUnwrittenError("an earlier record is still being written")
        if self._waiting >= MOST_WAITING:
            raise AuditUnwrittenError(f"{self._waiting} records wait to be written")

    async def _conclude(self, record: AuditRecord) -> None:
        """Writes the outcome to its end, also when the caller goes away meanwhile."""
        await asyncio.shield(self._background.once("audit", self._write_outcome(record)))

    async def _write_outcome(self, record: AuditRecord) -> None:
        audit_log.info("audit", audit=True, **record.fields())
        for ended in await self._write_all(record):
            if isinstance(ended, Exception):
                self._failures.labels("outcome").inc()
                log.error("outcome of an act not recorded", id=record.id, method=record.method, error=str(ended))

    def _withdraw(self, record: AuditRecord, begun: bool) -> None:
        """Says that an act was refused; also to the sinks if they may have its intent, or get it late."""
        audit_log.info("audit", audit=True, **record.fields())
        if begun:
            self._background.once("audit", self._write_withdrawn(record))

    async def _write_withdrawn(self, record: AuditRecord) -> None:
        await asyncio.gather(*self._late.values(), return_exceptions=True)
        await self._write_all(record)

    async def _write_all(self, record: AuditRecord) -> list[BaseException | None]:
        return await asyncio.gather(*(self._written(sink, record) for sink in self._sinks), return_exceptions=True)

    async def _written(self, sink: AuditSink, record: AuditRecord) -> None:
        """Returns when a sink has the record. Raises if it does not in time; the write then goes on."""
        if (late := self._late.get(sink)) is not None and not late.done():
            raise AuditUnwrittenError("an earlier record is still being written")
        writing = self._background.once("audit_write", sink.write(record))
        await asyncio.wait({writing}, timeout=self._write_s)
        if not writing.done():
            self._late[sink] = writing
            raise AuditUnwrittenError(f"it was not written within {self._write_s:g} s")
        await writing
