"""The servers that compute for the nodes of `ryzanstein up`, where they have no ranks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ryzanstein.cli.processes.cluster import OWN_RANKS

DEFAULT_NODES = 2
_ENGINE = "--engine"

Engines = Annotated[
    list[str],
    typer.Option(
        _ENGINE,
        metavar="URL|vllm|own",
        help="What computes for a node: a server that runs and serves the model (http://HOST:PORT, unix:///PATH), vllm for one "
        "that the node starts, own for ranks. Repeat it: each is a node. Ranks beside servers are in reserve.",
    ),
]


def num_nodes(asked: int | None, engines: Sequence[str], num_models: int) -> int:
    """Returns the number of nodes. Raises BadParameter for what cannot be had together."""
    if not engines:
        return asked or DEFAULT_NODES
    if asked not in (None, len(engines)):
        raise typer.BadParameter(f"each --engine is a node: there are {len(engines)}", param_hint="--nodes")
    servers = [engine for engine in engines if engine != OWN_RANKS]
    if servers and num_models > 1:
        raise typer.BadParameter("a server serves one model: give one --model", param_hint=_ENGINE)
    if twice := next((engine for engine in servers if "://" in engine and servers.count(engine) > 1), None):
        raise typer.BadParameter(f"{twice} is given twice: it would count as two nodes that fail together", param_hint=_ENGINE)
    return len(engines)
