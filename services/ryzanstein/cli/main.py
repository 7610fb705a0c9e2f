"""The command `ryzanstein`. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from ryzanstein.cli.access.authority_command import app as ca
from ryzanstein.cli.adapters.command import app as adapters
from ryzanstein.cli.chat.command import chat
from ryzanstein.cli.debug.command import debug
from ryzanstein.cli.demo.command import demo
from ryzanstein.cli.keys.command import app as keys
from ryzanstein.cli.logs.command import logs
from ryzanstein.cli.models.command import app as models
from ryzanstein.cli.profile.command import profile
from ryzanstein.cli.programs import add_programs
from ryzanstein.cli.rollout.deploy import deploy
from ryzanstein.cli.rollout.drain import drain, undrain
from ryzanstein.cli.status.audit import audit
from ryzanstein.cli.status.command import status
from ryzanstein.cli.status.usage import usage
from ryzanstein.cli.trace.command import trace
from ryzanstein.cli.up.command import up


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ryzanstein {version('ryzanstein')}")
        raise typer.Exit


def _root(
    _: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """A cluster that serves large language models: tensor-parallel nodes, session affinity, exactly-once failover."""


def build() -> typer.Typer:
    """Returns the application with all its subcommands."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for command in (demo, up, chat, status, debug, logs, trace, profile, usage, deploy, drain, undrain, audit):
        app.command()(command)
    app.add_typer(models, name="models")
    app.add_typer(adapters, name="adapters")
    app.add_typer(ca, name="ca")
    app.add_typer(keys, name="keys")
    add_programs(app)
    return app


def main() -> None:
    """Runs the command line.

    SIGTERM acts like Ctrl-C, so that services stop in order and temporary files are removed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    build()()
