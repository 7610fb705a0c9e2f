"""Options that several commands have, and what their values must be: a wrong one is named with its bound, and ends with 2."""

from __future__ import annotations

from typing import Annotated

import typer

LARGEST_PORT = 65535


def text_value(value: str | None) -> str | None:
    """What goes into a message: bytes of the command line that are no UTF-8 cannot. BadParameter."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("must be UTF-8 text") from None
    return value


def address_value(value: str | None) -> str | None:
    """host:port, or unix:PATH. BadParameter."""
    if value is None or (value.startswith("unix:") and text_value(value)):
        return value
    host, _, port = value.rpartition(":")
    if not (host and host.isascii() and port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= LARGEST_PORT):
        raise typer.BadParameter(f"must be host:port with a port from 1 to {LARGEST_PORT}, got {value[:80]!a}")
    return value


Router = Annotated[str, typer.Option(envvar="RYZANSTEIN_ROUTER", callback=address_value, help="host:port of a router.")]
Orchestrator = Annotated[
    str, typer.Option(envvar="RYZANSTEIN_ORCHESTRATOR", callback=address_value, help="host:port of the orchestrator.")
]
