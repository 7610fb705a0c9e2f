"""The console's settings: RYZANSTEIN_* or flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from ryzanstein.addresses import EVERY_HOST, is_loopback, join_address, split_address
from ryzanstein.config import ProcessSettings
from ryzanstein.files.state_home import default_state
from ryzanstein.survey.reach import KEY_VARIABLE, read_key, read_roots

_Read = TypeVar("_Read")


class ConsoleSettings(ProcessSettings):
    """The console: a page for people. On this machine a link opens it; elsewhere each person enters a key of their own."""

    port: int = Field(8765, ge=0, le=65535, description="port of the page; 0: a free port")
    router: str = Field("127.0.0.1:50051", description="host:port of a router; several with commas")
    orchestrator: str = Field(
        "127.0.0.1:50050", description="host:port of the orchestrator, several with commas, for the page of the cluster"
    )
    key_file: Path | None = Field(None, description=f"file with an API key, for a page on this machine; or set {KEY_VARIABLE}")
    ca: Path | None = Field(None, description="CA (PEM file) of routers with TLS")
    insecure: bool = Field(False, description="send keys to routers without TLS, also on other machines")
    tls_cert: Path | None = Field(None, description="certificate (PEM file) of the page, with its chain")
    tls_key: Path | None = Field(None, description="private key (PEM file) of the page")
    behind_proxy: bool = Field(False, description="a proxy with TLS stands before the page")
    public_url: str = Field("", description="address at which people reach the page, where it is not this machine alone")
    state_dir: Path = Field(
        default_factory=default_state("console"),
        description="directory for what a restart needs: digests of logins, and which answers run",
    )
    idle_s: float = Field(12 * 3600.0, ge=60, description="a person who does nothing for this long is logged out")
    log_level: str = Field("warning", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    drain_grace_s: float = Field(5.0, ge=0, description="how long answers may go on after SIGTERM before they are left")

    tls_dir: Path | None = Field(
        None, description="directory of an operator's or monitor's certificate, to query services with TLS"
    )

    @property
    def own_machine(self) -> bool:
        """Whether only this machine reaches the page. Then a link opens it, and everybody has the key of the process."""
        return is_loopback(self.host) and not self.behind_proxy

    @property
    def secure(self) -> bool:
        """Whether browsers reach the page with TLS."""
        return self.tls_cert is not None or self.public_url.startswith("https:")

    @property
    def routers(self) -> list[str]:
        return [each.strip() for each in self.router.split(",")]

    @field_validator("router")
    @classmethod
    def _are_addresses(cls, routers: str) -> str:
        for each in routers.split(","):
            split_address(each.strip())
        return routers

    @field_validator("public_url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not url:
            return url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ValueError("must be http://host[:port][/path] or https://...")
        return url.rstrip("/") + "/"

    def notes(self, port: int) -> Path | None:
        """Returns the folder of what this console keeps for a restart; None: the environment names no place for state."""
        return self.state_dir / str(port) if self.state_dir.is_absolute() else None

    def check_exposure(self) -> None:
        """Raises ValueError for a page that strangers would reach, or whose names are not known; it names the ways out."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("the page's certificate needs both --tls-cert and --tls-key")
        if self.behind_proxy and not self.public_url:
            raise ValueError("--behind-proxy needs --public-url, the address at which people reach the page")
        if self.own_machine or self.behind_proxy:
            return
        if self.tls_cert is None:
            raise ValueError(
                f"everybody who reaches {self.host} could read along: give it a certificate (--tls-cert, --tls-key), stand it "
                "behind a proxy with TLS (--behind-proxy, --public-url), or listen on 127.0.0.1 (--host)"
            )
        if self.host in EVERY_HOST and not self.public_url:
            raise ValueError(f"on {self.host} the page answers under the names that you give it alone: --public-url")

    def urls(self, port: int) -> list[str]:
        """Returns the addresses of the page, without a path: the first is for people."""
        scheme = "http" if self.tls_cert is None else "https"
        hosts = ["127.0.0.1", "localhost", "::1"] if is_loopback(self.host) else []
        if self.host not in (*hosts, *EVERY_HOST):
            hosts.insert(0, self.host)
        own = [f"{scheme}://{join_address(host, port)}" for host in hosts]
        if not self.public_url:
            return own
        parts = urlsplit(self.public_url)
        return [f"{parts.scheme}://{parts.netloc}", *own]

    def key(self) -> str:
        """Returns the process's own key; empty: none. Raises ValueError for a file that has none."""
        return _named("key_file", lambda: read_key(self.key_file))

    def roots(self) -> bytes | None:
        """Returns the CA of the routers; None: they have no TLS. Raises ValueError for a file that has none."""
        ca = self.ca
        return None if ca is None else _named("ca", lambda: read_roots(ca))


def _named(setting: str, read: Callable[[], _Read]) -> _Read:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
