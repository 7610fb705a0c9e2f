"""How commands reach services: with the certificate of an operator, or without TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.cli.programs import require
from ryzanstein.rpc.client import PLAIN, Dialer

TlsDir = Annotated[
    Path | None,
    typer.Option(
        envvar="RYZANSTEIN_TLS_DIR",
        help="Directory of an operator's or monitor's certificate, for services with TLS; see `ryzanstein ca`.",
    ),
]


def dialer_in(directory: Path | None) -> Dialer:
    """Returns how to dial services. Raises BadParameter if the certificate cannot be used."""
    if directory is None:
        return PLAIN
    require("status", "tls")
    from ryzanstein.auth.certificates.files import MaterialError
    from ryzanstein.rpc.tls.service_tls import operator_dialer

    try:
        return operator_dialer(directory)
    except MaterialError as error:
        raise typer.BadParameter(str(error), param_hint="--tls-dir") from None
