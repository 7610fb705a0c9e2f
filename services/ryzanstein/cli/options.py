"""Options shared by several commands, their defaults, and checks of their values.

The error for a wrong value states the bound, and the exit code is 2.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ryzanstein.addresses import split_address

GRPC_PORT = 50051
HTTP_PORT = 8000
ORCHESTRATOR_PORT = 50050
CONSOLE_PORT = 8765
ROUTER_ADDRESS = f"127.0.0.1:{GRPC_PORT}"
ORCHESTRATOR_ADDRESS = f"127.0.0.1:{ORCHESTRATOR_PORT}"


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
    try:
        split_address(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


def addresses_value(value: str | None) -> str | None:
    """Returns the value if it is one address or several, with commas between them. Raises BadParameter otherwise."""
    for each in (value or "").split(","):
        address_value(each.strip())
    return value


Routers = Annotated[
    str,
    typer.Option(envvar="RYZANSTEIN_ROUTER", callback=addresses_value, help="host:port of a router; several with commas."),
]
Router = Annotated[str, typer.Option(envvar="RYZANSTEIN_ROUTER", callback=address_value, help="host:port of a router.")]
Orchestrator = Annotated[
    str,
    typer.Option(
        envvar="RYZANSTEIN_ORCHESTRATOR", callback=addresses_value, help="host:port of the orchestrator; several with commas."
    ),
]
