"""`python -P -m ryzanstein.lab.bench.engine`, or `ryzanstein bench`: one subcommand per benchmark."""

from __future__ import annotations

import typer

from ryzanstein.lab.bench.engine.collectives.command import collectives
from ryzanstein.lab.bench.engine.compare.command import compare
from ryzanstein.lab.bench.engine.engine_command import engine
from ryzanstein.lab.bench.engine.loading import loading
from ryzanstein.lab.bench.engine.peers.install_command import install_peers
from ryzanstein.lab.bench.engine.reference_ceilings import machine
from ryzanstein.lab.bench.engine.scaling.command import scaling
from ryzanstein.lab.bench.engine.scaling.predict import predict_steps
from ryzanstein.lab.bench.engine.suite.command import suite
from ryzanstein.lab.bench.kv.command import kv
from ryzanstein.lab.bench.quality.command import quality

app = typer.Typer(
    help="Benchmarks of this machine: engine, collectives, loading, scaling, quality, keys and values.", no_args_is_help=True
)
app.command()(engine)
app.command()(install_peers)
app.command()(loading)
app.command()(collectives)
app.command()(scaling)
app.command("predict")(predict_steps)
app.command()(machine)
app.command()(suite)
app.command()(compare)
app.command()(quality)
app.command()(kv)

if __name__ == "__main__":
    app()
