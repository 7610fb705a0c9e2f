"""The orchestrator's settings: RYZANSTEIN_* or flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from ryzanstein.config import TUNING, ServiceSettings
from ryzanstein.files.state_home import default_state
from ryzanstein.orchestrator.placing.rolling import RolloutBounds
from ryzanstein.rpc.reading import MAX_RECORDS, RecordBound


@dataclass(frozen=True, slots=True)
class OrchestratorTuning:
    """The orchestrator's constants."""

    heartbeat_interval_s: Annotated[float, Field(gt=0, le=600)] = 0.5
    """Interval in seconds at which nodes send heartbeats."""
    settle_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long watchers wait after a restart for the previous members to come back, in seconds. It is
    longer than a node's longest pause between two registrations, after an outage of any length."""
    max_nodes: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    """Members."""
    max_deployments: Annotated[int, Field(ge=1, le=1024)] = 256
    """Models that are deployed."""
    max_watchers: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Open watches."""
    watch_queue: Annotated[int, Field(ge=1, le=65_536)] = 4096
    """Changes queued for a watcher; with more it gets a snapshot."""
    load_updates_per_s: Annotated[int, Field(ge=1, le=10**5)] = 100
    """Load changes sent to watchers per second, over all nodes."""
    rollout: RolloutBounds = field(default_factory=RolloutBounds)
    """How fast a new revision of a model replaces the earlier one."""
    max_request_records: RecordBound = MAX_RECORDS
    """Fields of a gRPC request, including those of nested messages."""


_MOVED = (
    "heartbeat_interval_s",
    "settle_s",
    "max_nodes",
    "max_deployments",
    "max_watchers",
    "watch_queue",
    "load_updates_per_s",
    "max_request_records",
)


class OrchestratorSettings(ServiceSettings):
    """The orchestrator: members with leases, desired deployments, and the view that routers follow."""

    grpc_port: int = Field(50050, ge=0, le=65535, description="gRPC API; 0: a free port, which is logged")
    tls_port: int = Field(50055, ge=0, le=65535, description="gRPC API with TLS; 0: a free port, which is logged")
    database: Path = Field(
        default_factory=default_state("orchestrator", "orchestrator.sqlite"),
        description="SQLite file, created if missing; by default in the state home, see docs/operate/configure.md",
    )
    audit_file: Path | None = Field(
        None,
        description="file that operators' acts are appended to, beside the log and the database; see docs/operate/secure.md",
    )
    lease_s: float = Field(3.0, ge=0.1, le=3600, description="a node without a heartbeat for this long is removed")
    drain_grace_s: float = Field(2.0, ge=0, description="how long running calls may take after SIGTERM")
    tuning: OrchestratorTuning = Field(default_factory=OrchestratorTuning, description=TUNING)

    moved: ClassVar[Mapping[str, str]] = MappingProxyType({name: name for name in _MOVED})

    @model_validator(mode="after")
    def _database_is_placed(self) -> Self:
        self._placed("database")
        return self

    @model_validator(mode="after")
    def _lease_spans_beats(self) -> Self:
        interval_s = self.tuning.heartbeat_interval_s
        if interval_s * 2 > self.lease_s:
            raise ValueError(
                f"lease_s ({self.lease_s}) must be at least twice tuning.heartbeat_interval_s ({interval_s}): "
                "one lost heartbeat must not end a membership"
            )
        return self
