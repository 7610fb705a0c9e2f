"""`ryzanstein logs`: what the services of `ryzanstein up` have logged, by time, and of whom one wants it."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from ryzanstein.cli import display
from ryzanstein.cli.logs.reading import ServiceFiles, followed, merged, service_names
from ryzanstein.cli.logs.record import LogRecord, Wanted
from ryzanstein.cli.options import text_value
from ryzanstein.files.state_home import VARIABLES, state_home

_SPAN = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
StateDir = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="The --state-dir of `ryzanstein up`; default: ryzanstein in the state home."),
]
ELSEWHERE = "kubectl -n ryzanstein logs -l app.kubernetes.io/part-of=ryzanstein --all-containers --prefix"


def logs(
    *,
    request: Annotated[str, typer.Option(callback=text_value, help="Of this request alone.")] = "",
    generation: Annotated[str, typer.Option(callback=text_value, help="Of this generation, or response of the HTTP API.")] = "",
    node: Annotated[str, typer.Option(callback=text_value, help="Of this node or other service, such as router-0.")] = "",
    rank: Annotated[int | None, typer.Option(min=0, max=63, help="Of this rank.")] = None,
    level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="The least level.")] = "debug",
    since: Annotated[
        str | None, typer.Option(help="From then on: a span such as 10m, or a time such as 2030-01-31T12:00.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is logged from now on, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as they are, one a line.")] = False,
    state_dir: StateDir = None,
) -> None:
    """Show the logs of a local cluster as one, in the order of time, across renamed files.

    Exit code 1: there are no logs. On Kubernetes they are where the platform keeps them.
    """
    wanted = Wanted(request, generation, node, rank, level, since_of(since, time.time()))
    directory = logs_directory(state_dir)
    files = [ServiceFiles(name, directory / f"{name}.log") for name in service_names(directory)]
    if not files:
        where = f"no logs in {directory}: `ryzanstein up` writes them there; on Kubernetes: {ELSEWHERE}"
        display.people().print(where, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    try:
        for record in merged(files):
            _show(record, wanted, as_json)
        if follow:
            sys.stdout.flush()
            with suppress(KeyboardInterrupt):
                for record in followed(files):
                    _show(record, wanted, as_json)
                    sys.stdout.flush()
    finally:
        for each in files:
            each.close()


def _show(record: LogRecord, wanted: Wanted, as_json: bool) -> None:
    if wanted.has(record):
        print(record.line if as_json else record.text)


def logs_directory(chosen: Path | None) -> Path:
    """Returns where a local cluster logs. Raises BadParameter if nothing says where."""
    directory = chosen or state_home()
    if directory is None:
        raise typer.BadParameter(f"is required, because the environment sets none of {VARIABLES}", param_hint="--state-dir")
    return directory.expanduser()


def since_of(text: str | None, now: float) -> float:
    """Returns the time in Unix seconds; None: the beginning. Raises BadParameter for what is no time."""
    if text is None:
        return 0.0
    if span := _SPAN.fullmatch(text):
        return now - int(span[1]) * _SECONDS[span[2]]
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter("must be a span such as 10m, or 2030-01-31T12:00", param_hint="--since") from None
    return (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).timestamp()
