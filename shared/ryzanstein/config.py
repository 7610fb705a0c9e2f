"""The settings of every service, which extends them in its `config`. `__main__` reads them once.

They come from the environment (`RYZANSTEIN_GRPC_PORT`) or from flags (`--grpc-port`); flags win.
Nothing else reads the environment.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ryzanstein.addresses import bare_host, checked_target
from ryzanstein.files.state_home import VARIABLES

# A larger number is a mistake: no count, size or time comes near these, and sums of them stay
# exact.
_LARGEST, _LARGEST_S = 2**53, 1e9


class ServiceSettings(BaseSettings):
    """Where a service listens and what it reports about itself."""

    model_config = SettingsConfigDict(
        env_prefix="RYZANSTEIN_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        allow_inf_nan=False,
    )

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 in a container, :: also for IPv6")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of Prometheus /metrics; 0: a free port, which is logged")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    log_file_bytes: int = Field(
        0, ge=0, description="size at which a file that standard error goes to is renamed, and a new one begun; 0: never"
    )
    log_files: int = Field(4, ge=1, le=1000, description="renamed files of log_file_bytes that are kept")
    otlp_endpoint: str = Field("", description="host:port of an OTLP gRPC collector; empty: no traces")
    max_request_bytes: int = Field(4 * 2**20, ge=2**16, le=2**26, description="maximum size of a gRPC request")
    max_request_records: int = Field(
        16_384, ge=1024, le=2**20, description="maximum fields of a gRPC request, including those of nested messages"
    )
    drain_grace_s: float = Field(30.0, ge=0, description="how long running requests may take after SIGTERM")

    def _placed(self, name: str) -> None:
        """Raises ValueError if a path is a default, and relative because there is no state home.

        It would be somewhere in the current folder, which is / for a unit of systemd.
        """
        if name not in self.model_fields_set and not getattr(self, name).is_absolute():
            raise ValueError(f"{name} must be set, because the environment sets none of {VARIABLES}")

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        return bare_host(host)

    @field_validator("orchestrator", "nodes", "otlp_endpoint", check_fields=False)
    @classmethod
    def _has_brackets(cls, addresses: str) -> str:
        return ",".join(checked_target(each.strip()) for each in addresses.split(","))

    @field_validator("*")
    @classmethod
    def _is_usable(cls, value: Any, info: ValidationInfo) -> Any:
        """Raises ValueError for numbers that are too large and text that is not UTF-8.

        A command line may contain such bytes, but they cannot be encoded.
        """
        largest = _LARGEST_S if (info.field_name or "").endswith("_s") else _LARGEST
        if isinstance(value, int | float) and value > largest:
            raise ValueError(f"must be at most {largest:.0f}")
        if isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value):
            raise ValueError("must be UTF-8 text")
        return value
