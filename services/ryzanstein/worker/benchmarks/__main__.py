"""`python -m ryzanstein.worker.benchmarks`, or `ryzanstein bench`: one subcommand per benchmark."""

from __future__ import annotations

import typer

from ryzanstein.worker.benchmarks.collectives import collectives
from ryzanstein.worker.benchmarks.engine import engine

app = typer.Typer(help="Measure what this machine does.", no_args_is_help=True)
app.command()(engine)
app.command()(collectives)

if __name__ == "__main__":
    app()
