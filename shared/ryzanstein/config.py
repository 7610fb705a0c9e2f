"""The settings that every service has. Each service extends them in its own `config`, reads them once in `__main__`.

From the environment (`RYZANSTEIN_GRPC_PORT`) or from flags (`--grpc-port`); flags win. Nothing else reads the environment.
"""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Where a service listens and what it tells about itself."""

    model_config = SettingsConfigDict(
        env_prefix="RYZANSTEIN_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 in a container")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus /metrics; 0: a free port, which is logged")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    otlp_endpoint: str = Field("", description="host:port of an OTLP gRPC collector; empty: no traces")
    max_request_bytes: int = Field(4 * 2**20, ge=2**16, le=2**26, description="of one gRPC request; a larger one is refused")
    max_request_records: int = Field(
        16_384, ge=1024, le=2**20, description="fields of one gRPC request, those of its messages included"
    )
    drain_grace_s: float = Field(30.0, ge=0, description="how long running requests may take after SIGTERM")
