"""The router's settings: read once in `__main__`, from flags and RYZANSTEIN_*."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ryzanstein.config import ServiceSettings


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
    queue_bound: int = Field(32, ge=0, description="sequences that may wait on a session's node before another is preferred")

    reattach_window_s: float = Field(30.0, ge=0, description="how long a generation lives without a reader")
    max_retained_tokens: int = Field(1_000_000, ge=0, description="tokens of ended generations that are kept for readers")
    failover_wait_s: float = Field(15.0, ge=0, description="how long a generation waits for a node before NO_NODES")
    max_fruitless_attempts: int = Field(5, ge=1, description="attempts in a row without a new token")
    accept_s: float = Field(5.0, gt=0, description="until a node has accepted what it was sent")
    attempt_silence_s: float = Field(
        20.0, gt=0, description="until an attempt brings a token on a node that works for others; longer with a queue"
    )

    suspect_phi: float = Field(3.0, gt=0, le=12, description="suspicion at which a backup starts")
    dead_phi: float = Field(8.0, gt=0, le=12, description="suspicion at which a link is given up, plus dead_grace_s")
    dead_grace_s: float = Field(0.5, ge=0)
    beat_jitter_s: float = Field(0.05, gt=0, description="least standard deviation assumed of a node's beats")
    stall_s: float = Field(2.0, gt=0, description="least time without a step, with work pending, that is a stall")
    stall_steps: float = Field(10.0, gt=0, description="and at least so many times a usual step")
