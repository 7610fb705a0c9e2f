"""The router's settings, read once in `__main__` from flags and RYZANSTEIN_* variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from ryzanstein.addresses import is_loopback
from ryzanstein.config import TUNING, ServiceSettings
from ryzanstein.files.state_home import default_state
from ryzanstein.router.access.oidc.urls import is_secure
from ryzanstein.router.choose import PolicyName
from ryzanstein.router.generations.retained import UnreadTurns
from ryzanstein.router.storage.bounds import LOG_BYTES, MOST_DAMAGED_BYTES, OTHER_FILES_BYTES, UNBOUNDED, USAGE_BYTES
from ryzanstein.router.tuning import MOVED, RouterTuning
from ryzanstein.storage.redis_url import checked_redis_url

_LAST_PORT = 65535
STORE_BYTES: Mapping[str, int] = MappingProxyType({"sqlite": 2**30, "memory": 128 * 2**20, "redis": UNBOUNDED})


class RouterSettings(ServiceSettings):
    """One router."""

    router_id: str = Field("", max_length=128, description="name sent to nodes and in logs; empty: host name and process id")
    processes: int = Field(
        1, ge=1, le=64, description="processes of this router, which share its ports and limits; see docs/operate/sizing.md"
    )
    grpc_port: int = Field(50051, ge=0, le=65535, description="public gRPC API; 0: a free port, which is logged")
    grpc_max_calls: int = Field(8192, ge=1, description="maximum gRPC calls at once; more get RESOURCE_EXHAUSTED")
    http: bool = Field(True, description="serve the HTTP API")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP API; 0: a free port, which is logged")
    http_max_body_bytes: int = Field(4 * 2**20, ge=1024, le=64 * 2**20, description="maximum size of an HTTP body")
    http_max_arriving_bytes: int = Field(128 * 2**20, ge=2**20, description="maximum total size of bodies being read")
    http_max_leaving_bytes: int = Field(
        128 * 2**20, ge=2**20, description="maximum total size of answers above 64 KiB whose clients have not read them yet"
    )
    http_keep_alive_s: float = Field(75.0, ge=1, description="how long an HTTP connection may be idle between requests")
    http_max_connections: int = Field(2048, ge=1, description="maximum HTTP connections; idle ones are closed for new ones")
    http_cors_origins: str = Field(
        "",
        max_length=4096,
        description="origins whose pages may use the HTTP API and WebSockets, comma-separated; *: all; empty: none",
    )
    http_hosts: str = Field(
        "",
        max_length=4096,
        description="names of this router in `Host`, comma-separated, where it listens on a loopback address without keys; "
        "localhost and IP addresses need not be given",
    )
    http_metrics: bool = Field(True, description="serve /metrics on the HTTP port too, besides metrics_port")
    websocket: bool = Field(True, description="serve WebSockets on the HTTP port, at /v1/ws")
    websocket_max_connections: int = Field(1024, ge=1, description="maximum WebSockets; they count as HTTP connections too")
    orchestrator: str = Field("", description="host:port of the orchestrator, several with commas; empty: only the given nodes")
    nodes: str = Field("", description="host:port of nodes, comma-separated, in addition to the orchestrator's")
    state_dir: Path = Field(
        default_factory=default_state("router"),
        description="directory for sessions and the last view of the cluster; by default in the state home, see "
        "docs/operate/configure.md",
    )

    session_store: Literal["sqlite", "redis", "memory"] = Field(
        "sqlite", description="sqlite: files in session_dir; redis: for routers on several hosts; memory: lost at a restart"
    )
    session_dir: Path | None = Field(
        None, description="directory of the SQLite files, shared by the routers of a host; empty: state_dir, not shared"
    )
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://[user:password@]host[:port][/database], rediss:// with TLS, unix://path; "
        "set it in the environment: other users can read the command line",
    )
    redis_prefix: str = Field("ryzanstein:", max_length=64, description="prefix of every key; lets clusters share a server")
    max_sessions: int = Field(100_000, ge=1, description="maximum sessions; beyond it the least recently used is evicted")
    max_responses: int = Field(100_000, ge=1, description="maximum kept responses; beyond it the oldest is forgotten")
    max_store_bytes: int | None = Field(
        None,
        ge=16 * 2**20,
        description="maximum bytes of sessions and kept responses together; beyond it the least recently used are evicted; "
        "unset: 1 GiB in files, 128 MiB in memory; Redis has its own maxmemory",
    )
    max_journal_bytes: int = Field(512 * 2**20, ge=16 * 2**20, description="maximum size of journal.db")
    max_session_messages: int = Field(2048, ge=2, description="maximum messages in a session")
    max_session_chars: int = Field(1_000_000, ge=1, description="maximum characters in a session")

    auth: Literal["off", "optional", "required"] | None = Field(
        None,
        description="off: everybody may call; optional: who sends a key must send a valid one; required: everybody must; "
        "unset: required where a source of keys is given, else off",
    )
    keys_file: Path | None = Field(
        None, description="file of keys and tenants, made by `ryzanstein keys add`; see docs/operate/access.md"
    )
    keys_redis: bool = Field(False, description="read keys and tenants from Redis, at redis_url; in place of keys_file")
    keys_max_age_s: float = Field(
        900.0, ge=1, description="how long keys are trusted while Redis is away; after that, callers get KEYS_UNAVAILABLE"
    )
    oidc_issuer: str = Field(
        "", max_length=2048, description="https:// address of an OpenID provider whose tokens (JWT) are accepted beside keys"
    )
    oidc_audience: str = Field("", max_length=2048, description="audience that its tokens must have")
    oidc_tenant_claim: str = Field(
        "tenant", min_length=1, max_length=256, description="claim of its tokens that names the tenant"
    )

    adapter_routes: bool = Field(
        False,
        description="serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter to keys with the scope `adapters`; needs "
        "orchestrator and keys; see docs/operate/adapters.md",
    )

    tls_cert: Path | None = Field(
        None,
        description="file with the certificate chain (PEM): clients are then served with TLS alone; see docs/operate/secure.md",
    )
    tls_key: Path | None = Field(None, description="file with its private key (PEM)")

    max_running: int = Field(4096, ge=1, description="maximum generations at once")
    max_waiting: int = Field(1024, ge=1, description="maximum generations per model not yet accepted by a node")
    max_messages: int = Field(2048, ge=1, description="maximum messages of a request, including its session's")
    max_prompt_chars: int = Field(1_000_000, ge=1, description="maximum characters of a prompt or conversation")
    max_prompt_tokens: int = Field(262_144, ge=1, description="maximum length of a prompt given as token ids")
    max_held_prompt_bytes: int = Field(
        128 * 2**20, ge=2**16, description="memory for the prompts of all generations that run or may go on"
    )
    keep_prompt_head: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="of prompts that do not fit the context the middle is left out, after so many first tokens; unset: they "
        "are refused; see docs/concepts/kv-cache.md",
    )
    default_deadline_s: float = Field(600.0, gt=0, description="deadline of requests without one")

    policy: PolicyName = Field("affinity", description="routing policy")
    model_policy: Annotated[dict[str, PolicyName], NoDecode] = Field(
        {}, description="MODEL=POLICY, repeated or comma-separated: routing policies of single models"
    )

    tls_port: int = Field(50053, ge=0, le=65535, description="gRPC for other routers with TLS; 0: a free port, which is logged")
    peer_port: int = Field(0, ge=0, le=65535, description="gRPC for other routers; 0: a free port, which is logged")
    router_address: str = Field(
        "",
        max_length=256,
        description="host:port, or an IP address, at which other routers reach this one; empty: host and peer_port",
    )
    unowned_tenant: str = Field(
        "", max_length=128, description="tenant that has the sessions of nobody, which were made before there were keys"
    )
    lease_s: float = Field(3.0, ge=0.5, le=60, description="how long a router that is silent keeps its generations")

    unread_grace_s: float = Field(
        5.0, ge=0.05, le=3600, description="how long a generation runs without a reader before it is paused"
    )
    unread_turns: UnreadTurns = Field(
        "keep", description="what a session keeps of an answer ended without a reader: keep what was sent, or drop the turn"
    )
    reattach_window_s: float = Field(30.0, ge=0, description="how long a generation is kept without a reader")
    max_retained_tokens: int = Field(1_000_000, ge=0, description="maximum tokens kept of ended generations")
    failover_wait_s: float = Field(15.0, ge=0, description="how long a generation waits without a usable node before NO_NODES")
    failover_to_incompatible: bool = Field(
        True, description="continue an answer on a node whose weights or numerics are others, where no like node could serve it"
    )

    tuning: RouterTuning = Field(default_factory=RouterTuning, description=TUNING)

    moved: ClassVar[Mapping[str, str]] = MOVED

    @property
    def auth_mode(self) -> Literal["off", "optional", "required"]:
        """`auth`, or what it is unless set: keys that are given are required."""
        return self.auth or ("required" if self.has_keys or self.oidc_issuer else "off")

    @property
    def protection(self) -> str:
        if self.auth_mode == "required":
            return "certificates for its port for other routers, which asks for no key (--tls require, --tls-dir)"
        return "keys (--keys-file)"

    @property
    def protected(self) -> bool:
        return self.auth_mode == "required" and (self.tls == "require" or not self.peers_on_host)

    @property
    def peers_on_host(self) -> bool:
        """Whether other routers reach this one at `host`. Those that share its files are on this machine, at loopback."""
        return self.session_store == "redis" or bool(self.session_store == "sqlite" and self.router_address)

    @property
    def has_keys(self) -> bool:
        """Whether a source of keys is given."""
        return self.keys_file is not None or self.keys_redis

    @property
    def reveals_keys(self) -> bool:
        """Whether keys of clients cross a network in clear, unless a proxy in front terminates TLS."""
        return self.auth_mode != "off" and self.tls_cert is None and not is_loopback(self.host)

    @property
    def store_bytes(self) -> int:
        """`max_store_bytes`, or its default for this store."""
        return self.max_store_bytes or STORE_BYTES[self.session_store]

    @property
    def disk_bytes(self) -> int:
        """What the files of a router with `session_store` sqlite take at most. Its logs are not in files of its own."""
        other = 3 * LOG_BYTES + MOST_DAMAGED_BYTES + USAGE_BYTES + OTHER_FILES_BYTES
        return (self.max_store_bytes or STORE_BYTES["sqlite"]) + self.max_journal_bytes + other

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: SecretStr) -> SecretStr:
        return SecretStr(checked_redis_url(url.get_secret_value())) if url.get_secret_value() else url

    @field_validator("oidc_issuer")
    @classmethod
    def _is_issuer(cls, url: str) -> str:
        if url and not is_secure(url):
            raise ValueError("must be an https:// address, or an http:// address of this machine")
        return url

    @model_validator(mode="after")
    def _state_is_placed(self) -> Self:
        self._placed("state_dir")
        return self

    @model_validator(mode="after")
    def _redis_has_a_url(self) -> Self:
        if not self.redis_url.get_secret_value():
            for wanted, name in ((self.session_store == "redis", "session_store redis"), (self.keys_redis, "keys_redis")):
                if wanted:
                    raise ValueError(f"{name} requires redis_url")
        return self

    @model_validator(mode="after")
    def _processes_share_files(self) -> Self:
        """Any of them serves a client that comes back, so they need a store, and none may move a log that others write to."""
        if self.processes > 1 and self.session_store == "memory":
            raise ValueError("processes above 1 requires session_store sqlite or redis")
        if self.processes > 1 and self.log_file_bytes:
            raise ValueError("processes above 1 cannot be combined with log_file_bytes")
        own = ("metrics_port", "health_port", "peer_port", *(("tls_port",) if self.tls != "off" else ()))
        firsts = [port for name in own if (port := getattr(self, name))]
        ports = [first + number for first in firsts for number in range(self.processes)]
        ports += [port for port in (self.grpc_port, self.http_port * self.http) if port]
        wrong = [port for port in ports if ports.count(port) > 1 or port > _LAST_PORT]
        if self.processes > 1 and wrong:
            raise ValueError(
                f"processes above 1 need a port each, upwards from {', '.join(own)}: {wrong[0]} is not free for one"
            )
        return self

    @model_validator(mode="after")
    def _certificate_has_a_key(self) -> Self:
        if (self.tls_cert is None) is not (self.tls_key is None):
            given, lacks = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{given} requires {lacks}")
        return self

    @model_validator(mode="after")
    def _auth_has_a_source(self) -> Self:
        if self.auth in ("optional", "required") and not (self.has_keys or self.oidc_issuer):
            raise ValueError(f"auth {self.auth} requires keys_file, keys_redis or oidc_issuer")
        if self.keys_redis and self.keys_file is not None:
            raise ValueError("keys_file and keys_redis cannot both be given")
        if self.oidc_issuer and not self.oidc_audience:
            raise ValueError("oidc_issuer requires oidc_audience")
        return self

    @model_validator(mode="after")
    def _adapters_are_for_operators(self) -> Self:
        """They have nodes read files: nobody may without a key, and someone must tell the nodes."""
        if self.adapter_routes and self.auth_mode != "required":
            raise ValueError("adapter_routes requires auth required")
        if self.adapter_routes and not self.orchestrator:
            raise ValueError("adapter_routes requires orchestrator")
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
