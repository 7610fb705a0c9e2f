"""The router's settings, read once in `__main__` from flags and RYZANSTEIN_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from ryzanstein.config import ServiceSettings
from ryzanstein.router.choose import PolicyName
from ryzanstein.router.generations.retained import UnreadTurns
from ryzanstein.router.storage.redis_url import checked_redis_url


class RouterSettings(ServiceSettings):
    """One router."""

    router_id: str = Field("", max_length=128, description="its name to nodes and in logs; empty: host name and process id")
    grpc_port: int = Field(50051, ge=0, le=65535, description="public gRPC API; 0: a free port, which is logged")
    http: bool = Field(True, description="serve the HTTP API")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP API; 0: a free port, which is logged")
    http_max_body_bytes: int = Field(4 * 2**20, ge=1024, le=64 * 2**20, description="body of an HTTP request")
    http_max_arriving_bytes: int = Field(256 * 2**20, ge=2**20, description="all bodies together that are being read")
    http_header_timeout_s: float = Field(10.0, gt=0, description="until an HTTP request's headers are there")
    http_body_timeout_s: float = Field(30.0, gt=0, description="and from then on until its body is")
    http_keep_alive_s: float = Field(75.0, ge=1, description="how long an HTTP connection may wait for its next request")
    http_max_connections: int = Field(2048, ge=1, description="HTTP connections at once; idle ones make room for new ones")
    orchestrator: str = Field("", description="host:port of the orchestrator; empty: only the nodes given")
    nodes: str = Field("", description="host:port of nodes, separated by commas, known besides the orchestrator's")
    state_dir: Path = Field(Path("var/router"), description="directory for sessions and the last view of the cluster")

    session_store: Literal["sqlite", "redis", "memory"] = Field(
        "sqlite", description="sqlite: files in session_dir; redis: for routers on several hosts; memory forgets at a restart"
    )
    session_dir: Path | None = Field(
        None, description="directory of sqlite's files, for all routers of a host; empty: state_dir, for this router alone"
    )
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://[user:password@]host[:port][/database], rediss:// with TLS, unix://path; "
        "give it in the environment, where other users of the machine do not see it",
    )
    redis_prefix: str = Field("ryzanstein:", max_length=64, description="begins every key, so that clusters can share a server")
    max_sessions: int = Field(100_000, ge=1, description="above it the least recently used session is forgotten")
    max_session_messages: int = Field(2048, ge=2)
    max_session_chars: int = Field(1_000_000, ge=1)
    store_wait_s: float = Field(
        0.25, ge=0.01, le=10, description="how long a request waits for the session store before it goes on without it"
    )
    store_recent_sessions: int = Field(10_000, ge=0, description="sessions kept in memory for when the store fails")
    store_recent_chars: int = Field(64_000_000, ge=0, description="and at most so many characters of them")
    store_backlog_writes: int = Field(10_000, ge=1, description="writes that may wait for a store that fails")
    store_backlog_chars: int = Field(64_000_000, ge=1, description="and at most so many characters")
    claim_ttl_s: float = Field(
        6.0, ge=0.5, le=300, description="how long a session stays busy at most when the router that answers in it says nothing"
    )

    max_running: int = Field(4096, ge=1, description="generations at once")
    max_waiting: int = Field(1024, ge=1, description="generations per model that no node has accepted yet")
    max_messages: int = Field(2048, ge=1, description="messages of a request, its session's included")
    max_prompt_chars: int = Field(1_000_000, ge=1)
    max_prompt_tokens: int = Field(262_144, ge=1, description="of a prompt that comes as token ids")
    default_deadline_s: float = Field(600.0, gt=0, description="for requests that bring none")

    policy: PolicyName = Field("affinity", description="how requests find their nodes")
    model_policy: Annotated[dict[str, PolicyName], NoDecode] = Field(
        {}, description="MODEL=POLICY, repeated or separated by commas: models with a policy of their own"
    )
    queue_bound: int = Field(32, ge=0, description="sequences that may wait on a session's node before another is preferred")
    load_window_s: float = Field(900.0, ge=1, le=86_400, description="how far back the load of nodes is looked at")
    load_floor: int = Field(32, ge=1, description="requests a node in the window below which evenness is not judged")
    bound_floor: int = Field(16, ge=1, description="requests in the window below which a node is never too full")
    load_bound: float = Field(1.04, ge=1.01, le=2, description="share of the mean load at which a bounded node takes no more")
    imbalance_alarm: float = Field(0.10, gt=0, le=10, description="fullest node over the mean, beyond chance: alarm")
    imbalance_switch: float = Field(0.15, gt=0, le=10, description="and at this much affinity becomes bounded")
    imbalance_calm: float = Field(0.05, gt=0, le=10, description="and below this both end")
    imbalance_calm_s: float = Field(900.0, ge=0, description="how long it must be calm before bounded becomes affinity again")
    prefix_entries: int = Field(65_536, ge=1, le=10_000_000, description="beginnings that the prefix policy remembers a model")

    router_address: str = Field(
        "", max_length=256, description="host:port at which other routers reach this one; empty: host and grpc_port"
    )
    lease_s: float = Field(3.0, ge=0.5, le=60, description="how long a router that says nothing keeps its generations")
    journal_flush_s: float = Field(0.05, ge=0.005, le=1, description="how far the journal of generations lags behind")

    unread_grace_s: float = Field(
        5.0, ge=0.05, le=3600, description="how long a generation runs without a reader before it is paused"
    )
    unread_turns: UnreadTurns = Field(
        "keep", description="of an answer that is ended because nobody reads it: keep in its session what was shown, or drop"
    )
    reattach_window_s: float = Field(30.0, ge=0, description="how long a generation lives without a reader")
    max_retained_tokens: int = Field(1_000_000, ge=0, description="tokens of ended generations that are kept for readers")
    failover_wait_s: float = Field(15.0, ge=0, description="how long a generation waits without any node before NO_NODES")
    max_fruitless_attempts: int = Field(5, ge=1, description="attempts in a row that may fail of the request")
    accept_s: float = Field(5.0, gt=0, description="until a node has accepted what it was sent")
    attempt_silence_s: float = Field(
        20.0, gt=0, description="until an attempt brings a token on a node that works for others; longer with a queue"
    )

    hedge_share: float = Field(0.25, ge=0, le=1, description="share of the running generations that may have a backup at once")
    hedge_min: int = Field(8, ge=0, description="backups that may always run at once; with hedge_share 0 and this 0: none")
    suspect_phi: float = Field(4.0, gt=0, le=12, description="suspicion at which a backup starts")
    dead_phi: float = Field(8.0, gt=0, le=12, description="suspicion at which a link is given up, plus dead_grace_s")
    dead_grace_s: float = Field(0.5, ge=0, description="waited beyond dead_phi; twice where the node beats but does not hear")
    beat_jitter_s: float = Field(0.05, gt=0, description="least standard deviation of beats; of answers to ours twice that")
    stall_s: float = Field(2.0, gt=0, description="least time without a step, with work pending, that is a stall")
    stall_steps: float = Field(10.0, gt=0, description="and at least so many times a usual step")

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: SecretStr) -> SecretStr:
        return SecretStr(checked_redis_url(url.get_secret_value())) if url.get_secret_value() else url

    @model_validator(mode="after")
    def _redis_has_a_url(self) -> Self:
        if self.session_store == "redis" and not self.redis_url.get_secret_value():
            raise ValueError("session_store redis needs redis_url")
        return self

    @field_validator("model_policy", mode="before")
    @classmethod
    def _read_pairs(cls, value: Any) -> Any:
        """Parses `MODEL=POLICY,MODEL=POLICY`; a model's name may itself contain an equals sign."""
        if not isinstance(value, str):
            return value
        pairs = [pair.strip().rpartition("=") for pair in value.split(",") if pair.strip()]
        if not all(model and policy for model, _, policy in pairs):
            raise ValueError("must be MODEL=POLICY")
        return {model: policy for model, _, policy in pairs}

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.imbalance_calm < self.imbalance_alarm <= self.imbalance_switch:
            raise ValueError("must be imbalance_calm < imbalance_alarm <= imbalance_switch")
        return self
