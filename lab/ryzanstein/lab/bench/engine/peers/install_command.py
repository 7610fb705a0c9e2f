"""The command `ryzanstein bench install-peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.lab.bench.engine.peers.catalog import ENVIRONMENTS
from ryzanstein.lab.bench.engine.peers.environment import choose_environments, install
from ryzanstein.lab.bench.engine.report import refusals_as_exit


def install_peers(
    peers_dir: Annotated[Path, typer.Argument(help="directory of the virtual environments; created if missing")],
    names: Annotated[list[str] | None, typer.Argument(help=f"any of {', '.join(ENVIRONMENTS)}; default: all")] = None,
) -> None:
    """Install the engines that `bench engine --peers` compares with, each into a separate virtual environment."""
    with refusals_as_exit() as people:
        for name, environment in choose_environments(names or []).items():
            people.print(f"{name}: {', '.join(environment.requirements)}")
            install(peers_dir, name, environment)
