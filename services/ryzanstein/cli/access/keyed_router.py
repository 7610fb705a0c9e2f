"""Channels to a router: with the API key of the user, if there is one, and with TLS where a CA is given.

No option takes the key itself: other users can read a command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.cli.access.router_trust import roots_of
from ryzanstein.client import AsyncClient, Tls
from ryzanstein.survey.reach import KEY_VARIABLE, KeyedRouter, RouterTrust, read_key

KeyFile = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help=f"File with an API key, for a router that asks for keys; or set {KEY_VARIABLE}."),
]
_PATIENCE_S = 5.0
"""How long no router may answer somebody who waits at a terminal."""


def keyed_router(address: str, key_file: Path | None, ca: Path | None) -> KeyedRouter:
    """Returns a router with the key of the file, or of the environment, and the CA. Raises BadParameter for unusable files."""
    return KeyedRouter(address, _key(key_file), None if ca is None else RouterTrust(roots_of(ca)))


def client_of(routers: str, key_file: Path | None, ca: Path | None, *, insecure: bool = False) -> AsyncClient:
    """Returns a client of routers, with commas between them. Raises BadParameter for what cannot be used."""
    tls = None if ca is None else Tls(roots_of(ca))
    try:
        return AsyncClient(routers, key=_key(key_file), tls=tls, insecure=insecure, patience_s=_PATIENCE_S)
    except ValueError as error:
        raise typer.BadParameter(str(error).replace("give `tls`, or `insecure=True`", "give --ca, or --insecure")) from None


def _key(key_file: Path | None) -> str:
    try:
        return read_key(key_file)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--key-file") from None
