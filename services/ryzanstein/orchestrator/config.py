"""The orchestrator's settings: RYZANSTEIN_* or flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from ryzanstein.config import TUNING, ServiceSettings
from ryzanstein.files.state_home import default_state
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds
from ryzanstein.rpc.reading import MAX_RECORDS, RecordBound
from ryzanstein.storage.redis_url import checked_redis_url


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
    store: Literal["sqlite", "redis"] = Field(
        "sqlite", description="sqlite: the database; redis: at redis_url, for several orchestrators"
    )
    leader_election: Literal["none", "redis", "kubernetes"] = Field(
        "none",
        description="which service says who leads of several orchestrators; none: there is one; see docs/operate/configure.md",
    )
    advertise_address: str = Field(
        "", description="host:port, or IP address, at which this orchestrator is reached when it leads; for leader_election"
    )
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://[user:password@]host[:port][/database], rediss:// with TLS, unix://path; "
        "set it in the environment: other users can read the command line",
    )
    redis_prefix: str = Field("ryzanstein:", max_length=64, description="prefix of every key; lets clusters share a server")
    kubernetes_lease: str = Field(
        "orchestrator",
        pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
        description="name of the Lease, in the pod's namespace",
    )
    lease_s: float = Field(3.0, ge=0.1, le=3600, description="a node without a heartbeat for this long is removed")
    replica_lease_s: float = Field(
        600.0,
        ge=1,
        le=86_400,
        description="a model whose start on a node shows no progress for this long has failed there; "
        "longer than the nodes' own tuning.ranks.start_s",
    )
    drain_grace_s: float = Field(2.0, ge=0, description="how long running calls may take after SIGTERM")
    tuning: OrchestratorTuning = Field(default_factory=OrchestratorTuning, description=TUNING)

    moved: ClassVar[Mapping[str, str]] = MappingProxyType({name: name for name in _MOVED})

    @model_validator(mode="after")
    def _database_is_placed(self) -> Self:
        self._placed("database")
        return self

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: SecretStr) -> SecretStr:
        return SecretStr(checked_redis_url(url.get_secret_value())) if url.get_secret_value() else url

    @model_validator(mode="after")
    def _several_share_a_store(self) -> Self:
        if self.leader_election != "none":
            if self.store != "redis":
                raise ValueError(f"leader_election {self.leader_election} requires store redis")
            if not self.advertise_address:
                raise ValueError(f"leader_election {self.leader_election} requires advertise_address")
        if self.store == "redis" and not self.redis_url.get_secret_value():
            raise ValueError("store redis requires redis_url")
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
