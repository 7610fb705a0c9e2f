"""`python -m ryzanstein.worker.benchmarks`, or `ryzanstein bench`: one subcommand per benchmark."""

from __future__ import annotations

import typer

from ryzanstein.worker.benchmarks.collectives import collectives
from ryzanstein.worker.benchmarks.compare import compare
from ryzanstein.worker.benchmarks.engine_command import engine
from ryzanstein.worker.benchmarks.loading import load
from ryzanstein.worker.benchmarks.peers.install_command import install_peers
from ryzanstein.worker.benchmarks.reference_ceilings import machine
from ryzanstein.worker.benchmarks.scaling import scaling
from ryzanstein.worker.benchmarks.scaling_predict import predict_steps
from ryzanstein.worker.benchmarks.suite import suite

app = typer.Typer(help="Measure what this machine does.", no_args_is_help=True)
app.command()(engine)
app.command()(install_peers)
app.command()(load)
app.command()(collectives)
app.command()(scaling)
app.command("predict")(predict_steps)
app.command()(machine)
app.command()(suite)
app.command()(compare)

if __name__ == "__main__":
    app()
