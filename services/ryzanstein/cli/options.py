"""Options shared by several commands, and checks of their values.

The error for a wrong value states the bound, and the exit code is 2.
"""

from __future__ import annotations

from typing import Annotated

import typer

LARGEST_PORT = 65535


def text_value(value: str | None) -> str | None:
    """Returns the value if it can be part of a message. Raises BadParameter if it is not UTF-8."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("must be UTF-8 text") from None
    return value


def address_value(value: str | None) -> str | None:
    """Returns the value if it is host:port or unix:PATH. Raises BadParameter otherwise."""
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
