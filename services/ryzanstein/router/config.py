"""The router's settings: read once in `__main__`, from flags and RYZANSTEIN_*."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from ryzanstein.config import ServiceSettings
from ryzanstein.router.choose import PolicyName


class RouterSettings(ServiceSettings):
    """One router."""

    router_id: str = Field("", max_length=128, description="its name to nodes and in logs; empty: host name and process id")
    grpc_port: int = Field(50051, ge=0, le=65535, description="public gRPC API; 0: a free port, which is logged")
    http: bool = Field(True, description="serve the HTTP API")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP API; 0: a free port, which is logged")
    orchestrator: str = Field("", description="host:port of the orchestrator; empty: only the nodes given")
    nodes: str = Field("", description="host:port of nodes, separated by commas, known besides the orchestrator's")
    state_dir: Path = Field(Path("var/router"), description="directory for sessions and the last view of the cluster")

    session_store: Literal["sqlite", "memory"] = Field("sqlite", description="memory forgets at a restart")
    max_sessions: int = Field(100_000, ge=1, description="above it the least recently used session is forgotten")
    max_session_messages: int = Field(2048, ge=2)
    max_session_chars: int = Field(1_000_000, ge=1)

    max_running: int = Field(4096, ge=1, description="generations at once")
    max_waiting: int = Field(1024, ge=1, description="generations per model that no node has accepted yet")
    max_messages: int = Field(2048, ge=1, description="messages of a request, its session's included")
    max_prompt_chars: int = Field(1_000_000, ge=1)
    max_prompt_tokens: int = Field(1_000_000, ge=1)
    default_deadline_s: float = Field(600.0, gt=0, description="for requests that bring none")

    policy: PolicyName = Field("affinity", description="how requests find their nodes")
    model_policy: Annotated[dict[str, PolicyName], NoDecode] = Field(
        {}, description="MODEL=POLICY, repeated or separated by commas: models with a policy of their own"
    )
    queue_bound: int = Field(32, ge=0, description="sequences that may wait on a session's node before another is preferred")
    load_window_s: float = Field(900.0, ge=1, le=86_400, description="how far back the load of nodes is looked at")
    load_floor: int = Field(32, ge=1, description="requests in the window below which a node is never too full")
    load_bound: float = Field(1.04, ge=1.01, le=2, description="share of the mean load at which a bounded node takes no more")
    imbalance_alarm: float = Field(0.10, gt=0, le=10, description="fullest node over the mean, beyond chance: alarm")
    imbalance_switch: float = Field(0.15, gt=0, le=10, description="and at this much affinity becomes bounded")
    imbalance_calm: float = Field(0.05, gt=0, le=10, description="and below this both end")
    imbalance_calm_s: float = Field(900.0, ge=0, description="how long it must be calm before bounded becomes affinity again")
    prefix_entries: int = Field(65_536, ge=1, le=10_000_000, description="beginnings that the prefix policy remembers a model")

    reattach_window_s: float = Field(30.0, ge=0, description="how long a generation lives without a reader")
    max_retained_tokens: int = Field(1_000_000, ge=0, description="tokens of ended generations that are kept for readers")
    failover_wait_s: float = Field(15.0, ge=0, description="how long a generation waits for a node before NO_NODES")
    max_fruitless_attempts: int = Field(5, ge=1, description="attempts in a row without a new token")

    suspect_phi: float = Field(3.0, gt=0, le=12, description="suspicion at which a backup starts")
    dead_phi: float = Field(8.0, gt=0, le=12, description="suspicion at which a link is given up, plus dead_grace_s")
    dead_grace_s: float = Field(0.5, ge=0)
    beat_jitter_s: float = Field(0.05, gt=0, description="least standard deviation assumed of a node's beats")
    stall_s: float = Field(2.0, gt=0, description="least time without a step, with work pending, that is a stall")
    stall_steps: float = Field(10.0, gt=0, description="and at least so many times a usual step")

    @field_validator("model_policy", mode="before")
    @classmethod
    def _read_pairs(cls, value: Any) -> Any:
        """From text, `MODEL=POLICY,MODEL=POLICY`; a model's name may itself contain an equals sign."""
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
