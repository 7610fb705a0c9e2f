"""Where an inference server is: the value of the setting `engine` that is not one of our names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from ryzanstein.addresses import join_address

_FORM = "http://HOST:PORT, https://HOST:PORT or unix:///PATH"
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_BASE = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")
_PORTS = {"http": 80, "https": 443}
_LONGEST_SOCKET = 107
"""Bytes of a socket's path on Linux (unix(7))."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An address. `base` is what URLs begin with; `socket` is the path of a Unix socket, or empty for TCP."""

    base: str
    socket: str = ""

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Returns the address. Raises ValueError with a sentence that names the setting and never repeats a password."""
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError(f"engine: must be {_FORM}, without spaces and only in ASCII")
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ValueError(f"engine: must be {_FORM}, got {text[:80]!a}") from None
        if "@" in parts.netloc:
            raise ValueError("engine: must have no user or password in it; a key comes from engine_key_file")
        if "?" in text or "#" in text:
            raise ValueError("engine: must have no query and no fragment")
        if parts.scheme == "unix":
            return cls("http://localhost", _socket_of(parts))
        if parts.scheme not in _PORTS:
            raise ValueError(f"engine: must be {_FORM}, got {text[:80]!a}")
        return cls(f"{parts.scheme}://{_place_of(parts)}{_base_of(parts)}")

    @property
    def is_tls(self) -> bool:
        return self.base.startswith("https:")

    def url(self, path: str) -> str:
        """Returns the URL of a path that begins with a slash."""
        return self.base + path

    def __str__(self) -> str:
        return f"unix://{self.socket}" if self.socket else self.base


def _socket_of(parts: SplitResult) -> str:
    if parts.netloc or not parts.path.startswith("/") or len(parts.path) > _LONGEST_SOCKET:
        raise ValueError(
            f"engine: must have an absolute path of at most {_LONGEST_SOCKET} bytes, as in unix:///run/engine.sock"
        )
    return parts.path


def _place_of(parts: SplitResult) -> str:
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = parts.hostname or "", 0
    if not _HOST.fullmatch(host):
        raise ValueError(f"engine: must be {_FORM}, got the host {host[:80]!a}")
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError("engine: must have a port from 1 to 65535")
    return join_address(host, _PORTS[parts.scheme] if port is None else port)


def _base_of(parts: SplitResult) -> str:
    base = parts.path.rstrip("/")
    if not _BASE.fullmatch(base):
        raise ValueError(f"engine: must have a plain path after the port, got {parts.path[:80]!a}")
    return base
