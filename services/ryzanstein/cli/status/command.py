"""`ryzanstein status`: problems first, then tables.

The tables show nodes, ranks, engines that are not the nodes' own, a router's links, recent losses, models, sessions,
and how services are protected.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from ryzanstein.cli import display
from ryzanstein.cli.access.dialing import TlsDir, dialer_in
from ryzanstein.cli.access.keyed_router import KeyFile, keyed_router
from ryzanstein.cli.access.router_trust import CaFile
from ryzanstein.cli.logs.command import StateDir
from ryzanstein.cli.options import ORCHESTRATOR_ADDRESS, ROUTER_ADDRESS, Orchestrator, Router
from ryzanstein.cli.status.status_tables import (
    engine_table,
    link_table,
    loss_table,
    model_table,
    node_table,
    protection_table,
    rank_table,
    router_table,
    session_table,
)
from ryzanstein.files.state_home import state_home
from ryzanstein.survey.look import look
from ryzanstein.survey.problems import problems
from ryzanstein.survey.views import ClusterStatus

_INTERVAL_S = 1.0
_TABLES = (
    node_table,
    rank_table,
    engine_table,
    router_table,
    link_table,
    loss_table,
    model_table,
    session_table,
    protection_table,
)


def status(
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    router: Router = ROUTER_ADDRESS,
    key_file: KeyFile = None,
    *,
    ca: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    tls_dir: TlsDir = None,
    live: Annotated[
        bool, typer.Option("--watch", help="Show it as it changes, until `q`; in a pipe: a line a change.")
    ] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="With --watch: nothing can be changed from there.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.25, max=3600, help="With --watch: seconds between two samples.")
    ] = _INTERVAL_S,
    state_dir: StateDir = None,
) -> None:
    """Show problems, nodes, ranks, links, losses, models, sessions, and how services are protected.

    Exit code 1: a service did not answer.

    In a narrow terminal the less important columns are left out.

    With --watch the exit code is 0. With --json, or without a terminal, it prints a line for each change.
    """
    if live:
        from ryzanstein.cli.watch.command import WatchOptions, watch

        options = WatchOptions(interval, read_only, as_json, state_dir or state_home())
        watch(orchestrator, keyed_router(router, key_file, ca), dialer_in(tls_dir), options)
        return
    if read_only or interval != _INTERVAL_S:
        raise typer.BadParameter("is for --watch", param_hint="--read-only" if read_only else "--interval")
    view = asyncio.run(look(orchestrator, keyed_router(router, key_file, ca), dialer_in(tls_dir)))
    if not as_json and {"orchestrator", "router"} <= view.errors.keys():
        nobody = f"nothing answers: no orchestrator at {orchestrator}, no router at {router}; `ryzanstein up` starts a cluster"
        display.people().print(nobody, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    if as_json:
        display.print_json(as_document(view))
    else:
        show(display.output(), view)
    for service, error in view.errors.items():
        display.people().print(f"{service} did not answer: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1 if view.errors else 0)


def as_document(view: ClusterStatus) -> dict[str, Any]:
    """Returns the status for scripts.

    States are names, times are seconds, and an unknown degree of tensor parallelism is null.
    """
    document = asdict(view)
    for visible, node_view in zip(document["nodes"], view.nodes, strict=True):
        visible["node"]["state"] = node_view.node.state.name
        visible["node"]["tp"] = node_view.node.tp or None
        for report in (*visible["node"]["models"], visible["report"] or {}):
            report.update({name: report[name].name for name in ("state", "next_state") if name in report})
    for visible, link in zip(document["router"]["links"], view.router.links, strict=True):
        visible["state"] = link.state.name
    return {"problems": problems(view), **document}


def show(console: Console, view: ClusterStatus) -> None:
    found = problems(view)
    for problem in found or ["no problems"]:
        console.print(problem, style="red" if found else "green", markup=False, soft_wrap=True)
    for table in (make(view) for make in _TABLES):
        if len(table):
            console.print(table)
