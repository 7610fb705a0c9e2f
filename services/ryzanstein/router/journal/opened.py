"""The core that the settings ask for: with a journal beside its session store, or in memory alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from ryzanstein.router.config import RouterSettings
from ryzanstein.router.journal.journal import Journal
from ryzanstein.router.journal.journalled_core import JournalledCore
from ryzanstein.router.journal.metrics import JournalMetrics, Outage
from ryzanstein.router.journal.recorder import JournalRecorder, Pace
from ryzanstein.router.journal.sqlite import SqliteJournal
from ryzanstein.router.recording import Unrecorded
from ryzanstein.router.router_core import RouterCore
from ryzanstein.router.telemetry import Telemetry


async def open_core(
    settings: RouterSettings, router_id: str, telemetry: Telemetry, make_core: Callable[..., RouterCore]
) -> RouterCore | JournalledCore:
    """`make_core` takes the `recorder`. OSError or sqlite3.Error when the journal's file cannot be used."""
    if settings.session_store == "memory":
        return make_core(recorder=Unrecorded())
    # From the death of a router: what is left of its lease, then the window that a client has to come back.
    retention_s = settings.lease_s + settings.reattach_window_s
    journal = await _open_journal(settings, retention_s)
    metrics = JournalMetrics(telemetry.registry)
    outage = Outage(metrics)
    recorder = JournalRecorder(journal, Pace(settings.journal_flush_s, retention_s), metrics, outage)
    # Another one after each start: a process that comes back has not the generations of the one before.
    owner_id = f"{router_id}/{uuid.uuid4().hex[:12]}"
    return JournalledCore(
        make_core(recorder=recorder),
        journal,
        recorder=recorder,
        owner_id=owner_id,
        lease_s=settings.lease_s,
        metrics=metrics,
        outage=outage,
    )


async def _open_journal(settings: RouterSettings, retention_s: float) -> Journal:
    if settings.session_store == "sqlite":
        path = (settings.session_dir or settings.state_dir) / "journal.db"
        return await SqliteJournal.open(path, settings.lease_s, retention_s)
    # An optional dependency: only who uses it has it installed.
    from ryzanstein.router.journal.redis import RedisJournal
    from ryzanstein.router.redis_client import redis_client

    client = redis_client(settings.redis_url.get_secret_value(), decode_responses=False)
    return RedisJournal(client, f"{settings.redis_prefix}journal:", settings.lease_s, retention_s)
