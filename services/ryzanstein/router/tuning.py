"""The router's constants, which no operator needs: each default stands in the room that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from ryzanstein.bounds import PositiveSeconds, PositiveSize
from ryzanstein.router.choose import BalanceSettings, PolicyBounds
from ryzanstein.router.faces.http.gate import HttpLimits
from ryzanstein.router.faces.http.serving.connections import ConnectionBounds
from ryzanstein.router.faces.websocket.limits import SocketLimits
from ryzanstein.router.failover.hedges import HedgePolicy
from ryzanstein.router.failover.patience import AttemptPatience
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.nodes.links.phi_detector import PhiThresholds
from ryzanstein.router.sessions.resilient.store import OutagePolicy
from ryzanstein.rpc.reading import MAX_RECORDS, RecordBound


@dataclass(frozen=True, slots=True)
class RouterTuning:
    """The router's constants."""

    policies: PolicyBounds = field(default_factory=PolicyBounds)
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    suspicion: PhiThresholds = field(default_factory=PhiThresholds)
    hedges: HedgePolicy = field(default_factory=HedgePolicy)
    patience: AttemptPatience = field(default_factory=AttemptPatience)
    max_fruitless_attempts: PositiveSize = RunnerPolicy().max_fruitless_attempts
    """Attempts in a row without a new token before ATTEMPTS_EXHAUSTED."""
    store: OutagePolicy = field(default_factory=OutagePolicy)
    claim_ttl_s: Annotated[float, Field(ge=0.5, le=300)] = 6.0
    """How long a session's claim lasts without renewal, in seconds, for example after its router died."""
    journal_flush_s: Annotated[float, Field(ge=0.005, le=1)] = 0.05
    """Interval of writes to the journal, in seconds."""
    http_header_timeout_s: PositiveSeconds = ConnectionBounds().header_timeout_s
    """Seconds until an HTTP request's headers are complete."""
    http_body_timeout_s: PositiveSeconds = HttpLimits().body_timeout_s
    """Seconds from then until its body is complete; also for a WebSocket's message."""
    websocket_max_streams: PositiveSize = SocketLimits().max_streams
    """Generations at once on a WebSocket."""
    max_request_records: RecordBound = MAX_RECORDS
    """Fields of a gRPC request, including those of nested messages."""


MOVED: Mapping[str, str] = MappingProxyType(
    {
        "failover_to_unlike": "failover_to_incompatible",
        "queue_bound": "policies.queue_bound",
        "load_bound": "policies.load_bound",
        "bound_floor": "policies.bound_floor",
        "prefix_entries": "policies.prefix_entries",
        "load_window_s": "balance.window_s",
        "load_floor": "balance.thresholds.floor",
        "imbalance_alarm": "balance.thresholds.alarm",
        "imbalance_switch": "balance.thresholds.switch",
        "imbalance_calm": "balance.thresholds.calm",
        "imbalance_calm_s": "balance.thresholds.calm_s",
        "suspect_phi": "suspicion.suspect_phi",
        "dead_phi": "suspicion.dead_phi",
        "dead_grace_s": "suspicion.grace_s",
        "beat_jitter_s": "suspicion.jitter_s",
        "stall_s": "suspicion.stall_s",
        "stall_steps": "suspicion.stall_steps",
        "hedge_share": "hedges.share",
        "hedge_min": "hedges.least",
        "accept_s": "patience.accept_s",
        "attempt_silence_s": "patience.silence_s",
        "max_fruitless_attempts": "max_fruitless_attempts",
        "store_wait_s": "store.wait_s",
        "store_recent_sessions": "store.recent_sessions",
        "store_recent_chars": "store.recent_chars",
        "store_backlog_writes": "store.backlog_writes",
        "store_backlog_chars": "store.backlog_chars",
        "claim_ttl_s": "claim_ttl_s",
        "journal_flush_s": "journal_flush_s",
        "http_header_timeout_s": "http_header_timeout_s",
        "http_body_timeout_s": "http_body_timeout_s",
        "websocket_max_streams": "websocket_max_streams",
        "max_request_records": "max_request_records",
    }
)
"""Settings of earlier releases, and their places here."""
