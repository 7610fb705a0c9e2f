"""`ryzanstein adapters`: `add`, `list`, `remove`, `pin` and `unpin`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import asdict, replace
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter
from ryzanstein.cli import display
from ryzanstein.cli.access.dialing import TlsDir, dialer_in
from ryzanstein.cli.options import ORCHESTRATOR_ADDRESS, Orchestrator, text_value
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import name_fault
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.adapters import AdapterClient, AdapterView

app = typer.Typer(no_args_is_help=True, help="Say which adapters (LoRA) of a model the nodes answer with.")
WAIT_S = 60.0
MAX_PATH_CHARS = 1024
_Result = TypeVar("_Result")

Name = Annotated[str, typer.Argument(metavar="NAME", callback=text_value, help="Model name that requests give.")]


@app.command()
def add(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            callback=text_value,
            help="Directory that peft wrote, or GGUF file, as the nodes find it.",
        ),
    ],
    *,
    to: Annotated[str, typer.Option("--to", metavar="MODEL", callback=text_value, help="Model that it changes.")],
    pin: Annotated[bool, typer.Option("--pin", help="Keep it in memory.")] = False,
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    wait: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds to wait for the nodes; 0: do not wait.")] = WAIT_S,
    tls_dir: TlsDir = None,
) -> None:
    """Register an adapter on every node of its model, in place of one of the same name, and wait until they have it.

    The nodes read all of it and check that it fits. What runs with an earlier one ends with that one.

    Exit code 1: refused, a node cannot have it, or not in time. It stays in force for nodes that come later.
    """
    if fault := name_fault(name):
        raise typer.BadParameter(fault, param_hint="'NAME'")
    full = os.path.abspath(path)
    if len(full) > MAX_PATH_CHARS:
        raise typer.BadParameter(f"must have at most {MAX_PATH_CHARS} characters, got {len(full)}", param_hint="'PATH'")
    _add(orchestrator, dialer_in(tls_dir), DeployedAdapter(name, to, full, pin), wait)


@app.command("list")
def list_adapters(
    *,
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    tls_dir: TlsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the adapters, and which nodes have them."""
    dialer = dialer_in(tls_dir)

    async def look() -> list[AdapterView]:
        async with AdapterClient(orchestrator, dialer) as client:
            return await client.look(await client.all())

    views = _run(look())
    if as_json:
        listed = [{**asdict(view.adapter), "nodes": [asdict(each) for each in view.nodes]} for view in views]
        display.print_json({"adapters": listed})
    elif views:
        display.output().print(_table(views))
    else:
        _tell("there are no adapters")


@app.command()
def remove(name: Name, *, orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS, tls_dir: TlsDir = None) -> None:
    """Withdraw an adapter: new requests are refused, what runs with it ends."""
    dialer = dialer_in(tls_dir)

    async def withdraw() -> None:
        async with AdapterClient(orchestrator, dialer) as client:
            await client.remove(name)

    _run(withdraw())
    _tell(f"{name!r} is removed")


@app.command()
def pin(name: Name, *, orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS, tls_dir: TlsDir = None) -> None:
    """Keep an adapter in the memory of the nodes, and load it now."""
    _pin(name, True, orchestrator, dialer_in(tls_dir))


@app.command()
def unpin(name: Name, *, orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS, tls_dir: TlsDir = None) -> None:
    """Let an adapter make room for others when it is idle."""
    _pin(name, False, orchestrator, dialer_in(tls_dir))


def _pin(name: str, pinned: bool, orchestrator: str, dialer: Dialer) -> None:
    async def find() -> DeployedAdapter:
        async with AdapterClient(orchestrator, dialer) as client:
            found = await client.find(name)
        if found is None:
            raise errors.not_found("adapter", name)
        return replace(found, pinned=pinned)

    _add(orchestrator, dialer, _run(find()), WAIT_S)


def _add(orchestrator: str, dialer: Dialer, adapter: DeployedAdapter, wait_s: float) -> None:
    view = _run(_deployed(orchestrator, dialer, adapter, wait_s))
    if view is None:
        _tell(f"{adapter.name!r} is stored")
        return
    for node in view.refused:
        display.people().print(f"node {node.node_id}: {node.refusal}", style="red", markup=False, soft_wrap=True)
    if view.nodes and len(view.ready) == len(view.nodes):
        ready = view.ready[0]
        _tell(f"{adapter.name!r} is ready on {len(view.ready)} of {len(view.nodes)} nodes ({ready.num_bytes / 2**20:.1f} MiB)")
        return
    where = (
        f"ready on {len(view.ready)} of {len(view.nodes)} nodes" if view.nodes else f"no node has the model {adapter.model!r}"
    )
    display.people().print(f"{adapter.name!r} is stored; {where}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)


async def _deployed(orchestrator: str, dialer: Dialer, adapter: DeployedAdapter, wait_s: float) -> AdapterView | None:
    """Stores the adapter; returns how the nodes have it then, None if nobody waits for them."""
    async with AdapterClient(orchestrator, dialer) as client:
        stored = await client.deploy(adapter)
        return await client.settle(stored, wait_s) if wait_s else None


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    try:
        return asyncio.run(work)
    except RyzansteinError as error:
        display.show_error(display.people(), error)
        raise typer.Exit(1) from None


def _table(views: list[AdapterView]) -> Table:
    table = Table("adapter", "model", "path", "revision", "nodes", "in memory", "pinned", "why not")
    for view in views:
        adapter, resident = view.adapter, sum(node.resident for node in view.nodes)
        table.add_row(
            adapter.name,
            adapter.model,
            adapter.path,
            str(adapter.revision),
            f"{len(view.ready)} of {len(view.nodes)}",
            str(resident),
            "yes" if adapter.pinned else "",
            "; ".join(f"{node.node_id}: {node.refusal}" for node in view.refused)[:200],
        )
    return table


def _tell(text: str) -> None:
    display.people().print(text, markup=False, soft_wrap=True)
