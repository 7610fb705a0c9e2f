"""Channels to a router: with the API key of the user, if there is one, and with TLS where a CA is given.

No option takes the key itself: other users can read a command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from ryzanstein.rpc.client import client_options

VARIABLE = "RYZANSTEIN_API_KEY"
KeyFile = Annotated[
    Path | None, typer.Option(dir_okay=False, help=f"File with an API key, for a router that asks for keys; or set {VARIABLE}.")
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar="RYZANSTEIN_CA",
        dir_okay=False,
        help="File with the CA (PEM) that vouches for the router: it is then reached with TLS alone.",
    ),
]
_MAX_KEY_CHARS = 8192
_MAX_CA_BYTES = 2**22  # the CAs of a Linux distribution are 0.2 MB


@dataclass(frozen=True, slots=True)
class KeyedRouter:
    """A router at host:port, and the key for it; empty: none.

    `roots` are the CAs in PEM that vouch for it; empty: it is reached without TLS. `name` is what its
    certificate is for, where that is not the host.
    """

    address: str
    key: str = field(default="", repr=False)
    roots: bytes = field(default=b"", repr=False)
    name: str = ""

    def open(self) -> grpc.aio.Channel:
        """Returns a channel, which the caller closes. All its calls carry the key."""
        interceptors = [_UnaryKey(self.key), _StreamKey(self.key)] if self.key else None
        if not self.roots:
            return grpc.aio.insecure_channel(self.address, options=client_options(), interceptors=interceptors)
        options = (*client_options(), *name_options(self.name))
        credentials = grpc.ssl_channel_credentials(self.roots)
        return grpc.aio.secure_channel(self.address, credentials, options=options, interceptors=interceptors)


def name_options(name: str) -> tuple[tuple[str, str], ...]:
    """Returns the options of a channel to a server whose certificate is for another name than its address."""
    return (("grpc.ssl_target_name_override", name),) if name else ()


def keyed_router(address: str, key_file: Path | None, ca: Path | None) -> KeyedRouter:
    """Returns a router with the key of the file, or of the environment, and the CA. Raises BadParameter for unusable files."""
    return KeyedRouter(address, _key(key_file), b"" if ca is None else read_roots(ca))


def read_roots(path: Path) -> bytes:
    """Returns the certificates in a file. Raises BadParameter if it has none."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CA_BYTES + 1)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint="--ca") from None
    if len(content) > _MAX_CA_BYTES or b"-----BEGIN CERTIFICATE-----" not in content:
        raise typer.BadParameter(f"{path} has no certificate in PEM form", param_hint="--ca")
    return content


def _key(key_file: Path | None) -> str:
    if key_file is None:
        return os.environ.get(VARIABLE, "").strip()
    try:
        text = key_file.read_text()[: _MAX_KEY_CHARS + 1].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{key_file} cannot be read: {error}", param_hint="--key-file") from None
    if not text or len(text) > _MAX_KEY_CHARS or not (text.isascii() and text.isprintable()):
        raise typer.BadParameter(f"{key_file} must have one key and nothing else", param_hint="--key-file")
    return text


def _with_key(key: str, details: Any) -> Any:
    return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {key}")))


class _UnaryKey(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_key(self._key, details), request)


class _StreamKey(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_key(self._key, details), request)
