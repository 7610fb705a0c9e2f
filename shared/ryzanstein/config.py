"""The settings of every process, which extends them in its `config`. `__main__` reads them once.

They come from the environment (`RYZANSTEIN_GRPC_PORT`) or from flags (`--grpc-port`); flags win.
Nothing else reads the environment. Constants that no operator needs are in one setting, `tuning`.
A setting that became such a constant is still accepted for one release, see `ServiceSettings.moved`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from ryzanstein.addresses import bare_host, checked_target, is_loopback
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, checked_trust
from ryzanstein.bounds import LARGEST, LARGEST_S
from ryzanstein.files.state_home import VARIABLES

PREFIX = "RYZANSTEIN_"
TUNING = "constants for tests and experiments, a JSON object; not part of the compatible interface"


class ProcessSettings(BaseSettings):
    """Where a process listens, how it ends, and what it reports about itself."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        allow_inf_nan=False,
    )

    moved: ClassVar[Mapping[str, str]] = {}
    """Settings of earlier releases: name to place in `tuning`, such as "stall_s" to "suspicion.stall_s", or to its new name."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 in a container, :: also for IPv6")
    insecure: bool = Field(False, description="listen without protection where the network is what protects this service")
    metrics_port: int = Field(0, ge=0, le=65535, description="port of Prometheus /metrics; 0: a free port, which is logged")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    log_file_bytes: int = Field(
        0, ge=0, description="size at which a file that standard error goes to is renamed, and a new one begun; 0: never"
    )
    log_files: int = Field(4, ge=1, le=1000, description="renamed files of log_file_bytes that are kept")
    drain_grace_s: float = Field(30.0, ge=0, description="how long running requests may take after SIGTERM")

    tls_dir: Path | None = Field(
        None, description="directory with tls.crt, tls.key, ca.crt and perhaps denied, which are read again when they change"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns what is read, the first wins; `tuning` is put together from all of them."""
        moved = in_tuning(cls, moved_variables(cls).items())
        return init_settings, env_settings, InitSettingsSource(settings_cls, moved)

    def _placed(self, name: str) -> None:
        """Raises ValueError if a path is a default, and relative because there is no state home.

        It would be somewhere in the current folder, which is / for a unit of systemd.
        """
        if name not in self.model_fields_set and not getattr(self, name).is_absolute():
            raise ValueError(f"{name} must be set, because the environment sets none of {VARIABLES}")

    def check_exposure(self) -> None:
        """Raises ValueError for a process that strangers would reach and use; it names the ways out."""
        raise NotImplementedError

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
        largest = LARGEST_S if (info.field_name or "").endswith("_s") else LARGEST
        if isinstance(value, int | float) and value > largest:
            raise ValueError(f"must be at most {largest:.0f}")
        if isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value):
            raise ValueError("must be UTF-8 text")
        return value


class ServiceSettings(ProcessSettings):
    """What a service has besides: calls of others, their traces, and certificates of its own.

    Each service has a field `tuning` of its own.
    """

    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of health checks alone, without TLS, for probes that have no certificate; 0: a free port, which is "
        "logged; unset: none",
    )
    otlp_endpoint: str = Field(
        "", description="host:port of an OTLP gRPC collector, https://host:port with TLS; empty: no traces"
    )
    trace_dir: Path | None = Field(
        None, description="directory for traces, of at most 32 MiB for each service, that `ryzanstein trace` reads; unset: none"
    )
    trace_ratio: float = Field(1.0, ge=0, le=1, description="share of the traces that begin here which are recorded")
    grpc_server: Literal["builtin", "grpcio"] = Field(
        "builtin",
        description="what serves gRPC: the builtin server, which costs less for each message, or the library grpcio",
    )
    max_request_bytes: int = Field(4 * 2**20, ge=2**16, le=2**26, description="maximum size of a gRPC request")
    tls: Literal["off", "accept", "require"] = Field(
        "off",
        description="TLS between services; accept: listen also without it, dial others with it; require: only with it; see "
        "docs/operate/secure.md",
    )
    tls_port: int = Field(0, ge=0, le=65535, description="gRPC API for services, with TLS; 0: a free port, which is logged")
    trust_domain: str = Field(DEFAULT_TRUST, description="domain in the names of all services' certificates")

    @field_validator("trust_domain")
    @classmethod
    def _is_a_domain(cls, domain: str) -> str:
        return checked_trust(domain)

    @field_validator("otlp_endpoint")
    @classmethod
    def _has_a_known_scheme(cls, endpoint: str) -> str:
        scheme, separator, _ = endpoint.lower().partition("://")
        if separator and scheme not in ("http", "https"):
            raise ValueError("must be host:port, http://host:port or https://host:port")
        return endpoint

    @model_validator(mode="after")
    def _has_certificates(self) -> Self:
        if self.tls != "off" and self.tls_dir is None:
            raise ValueError(f"tls {self.tls} needs tls_dir; `ryzanstein ca` makes certificates")
        return self

    @property
    def protection(self) -> str:
        """What would protect the service, for people."""
        return "certificates (--tls require, --tls-dir)"

    @property
    def protected(self) -> bool:
        """Whether strangers who reach the service are refused."""
        return self.tls == "require"

    @property
    def exposed(self) -> bool:
        """Whether strangers reach the service and may use it."""
        return not (self.protected or is_loopback(self.host))

    def check_exposure(self) -> None:
        """Raises ValueError for a service that strangers would reach and use; it names the ways out."""
        if self.insecure or not self.exposed:
            return
        raise ValueError(
            f"everybody who reaches {self.host} could use this service: give it {self.protection}, listen on 127.0.0.1 "
            "(--host), or say --insecure where the network protects it; see docs/operate/secure.md"
        )


def moved_variables(kind: type[ProcessSettings]) -> dict[str, str]:
    """Returns the variables of the environment that set what is in `tuning` now: name to value."""
    moved = {variable(name): name for name in kind.moved}
    return {moved[name.upper()]: value for name, value in os.environ.items() if name.upper() in moved}


def moved_flags(kind: type[ProcessSettings], arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments without the flags that set what is in `tuning` now, and these: name to value."""
    moved, kept, found = {flag(name): name for name in kind.moved}, [], {}
    switches = {flag(name): name for name in kind.moved if _is_switch(kind, name)}
    rest = iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        switched = option.replace("--no-", "--", 1)
        if switched in switches and not equals:
            found[switches[switched]] = str(option == switched)
        elif option in moved:
            found[moved[option]] = value if equals else next(rest, "")
        else:
            kept.append(argument)
    return kept, found


def in_tuning(kind: type[ProcessSettings], moved: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Returns these settings where they are now: nested under `tuning`; empty if there are none."""
    nested: dict[str, Any] = {}
    for name, value in moved:
        *groups, field = place_of(kind, name).split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[field] = value
    return nested


def _is_switch(kind: type[ProcessSettings], name: str) -> bool:
    """Whether a setting of an earlier release is given as a flag without a value."""
    field = kind.model_fields.get(kind.moved[name])
    return field is not None and field.annotation is bool


def place_of(kind: type[ProcessSettings], name: str) -> str:
    """Returns where a setting of an earlier release is now."""
    place = kind.moved[name]
    return place if place in kind.model_fields else f"tuning.{place}"


def variable(name: str) -> str:
    """Returns the name of a setting in the environment."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """Returns the name of a setting on a command line."""
    return "--" + name.replace("_", "-")
