"""The orchestrator's settings: RYZANSTEIN_* or flags."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from ryzanstein.config import ServiceSettings
from ryzanstein.files.state_home import default_state


class OrchestratorSettings(ServiceSettings):
    """The orchestrator: members with leases, desired deployments, and the view that routers follow."""

    grpc_port: int = Field(50050, ge=0, le=65535, description="gRPC API; 0: a free port, which is logged")
    database: Path = Field(
        default_factory=default_state("orchestrator", "orchestrator.sqlite"),
        description="SQLite file, created if missing; by default in the state home, see docs/operate/configure.md",
    )
    lease_s: float = Field(3.0, ge=0.1, le=3600, description="a node without a heartbeat for this long is removed")
    heartbeat_interval_s: float = Field(0.5, gt=0, le=600, description="interval at which nodes send heartbeats")
    # Longer than a node's longest pause between two registrations, after an outage of any length.
    settle_s: float = Field(
        10.0, ge=0, le=3600, description="how long watchers wait after a restart for the previous members to come back"
    )
    max_nodes: int = Field(10_000, ge=1, le=10_000, description="maximum members")
    max_deployments: int = Field(256, ge=1, le=1024, description="maximum deployments")
    max_watchers: int = Field(1024, ge=1, le=65536, description="maximum open watches")
    watch_queue: int = Field(4096, ge=1, le=65536, description="changes queued per watcher before it gets a snapshot")
    load_updates_per_s: int = Field(
        100, ge=1, le=10**5, description="maximum load changes per second sent to watchers, over all nodes"
    )
    drain_grace_s: float = Field(2.0, ge=0, description="how long running calls may take after SIGTERM")

    @model_validator(mode="after")
    def _database_is_placed(self) -> Self:
        self._placed("database")
        return self

    @model_validator(mode="after")
    def _lease_spans_beats(self) -> Self:
        if self.heartbeat_interval_s * 2 > self.lease_s:
            raise ValueError(
                f"lease_s ({self.lease_s}) must be at least twice heartbeat_interval_s ({self.heartbeat_interval_s}): "
                "one lost heartbeat must not end a membership"
            )
        return self
