"""`ryzanstein drain` and `undrain`: a node finishes its work, or takes work again.

A draining node takes no new work.

They ask the orchestrator or the node itself.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration

from ryzanstein.cli import display
from ryzanstein.cli.access.dialing import TlsDir, dialer_in
from ryzanstein.cli.options import ORCHESTRATOR_ADDRESS, Orchestrator, address_value, text_value
from ryzanstein.cli.rollout.last_node import LastNode, last_node, last_node_at
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import ANY_NODE, ORCHESTRATOR
from ryzanstein.v1 import orchestrator_pb2, orchestrator_pb2_grpc, worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 10.0


def drain(
    node: Annotated[
        str | None, typer.Argument(callback=text_value, help="The node's id, as `ryzanstein status` shows it.")
    ] = None,
    *,
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    direct: Annotated[
        str | None, typer.Option(callback=address_value, help="host:port of the node: drain it directly and wait for its work.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, max=86_400, help="With --direct: seconds to wait for running work.")] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Do not prompt, even for the last ready node.")] = False,
    below_min: Annotated[bool, typer.Option("--below-min", help="Drain it also below --min-nodes.")] = False,
    tls_dir: TlsDir = None,
) -> None:
    """Drain a node: it finishes its work and takes nothing new."""
    if (node is None) == (direct is None):
        raise typer.BadParameter("give either a NODE or --direct")
    if below_min and direct is not None:
        raise typer.BadParameter("a node that is asked directly knows no such bound", param_hint="'--below-min'")
    people, dialer = display.people(), dialer_in(tls_dir)
    try:
        if not force:
            last = last_node(orchestrator, str(node), dialer) if direct is None else last_node_at(orchestrator, direct, dialer)
            _confirm(asyncio.run(last))
        if direct is not None:
            unfinished = asyncio.run(drain_node(direct, grace, dialer))
            people.print(f"{direct} drained, unfinished generations: {unfinished}")
        else:
            asyncio.run(request_drain(orchestrator, str(node), dialer, below_min=below_min))
            people.print(f"{node} is draining", markup=False)
    except RyzansteinError as error:
        display.show_error(people, error)
        raise typer.Exit(1) from None


def _confirm(last: LastNode | None) -> None:
    """Asks for confirmation before the last ready node drains.

    Exits with code 1 if the answer is no or standard input is not a terminal.
    """
    if last is None:
        return
    people = display.people()
    if not sys.stdin.isatty():
        people.print(f"{last}; use --force to drain it anyway", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    if not typer.confirm(f"{last}. Drain it?", err=True):
        people.print("nothing was changed")
        raise typer.Exit(1)


def undrain(
    node: Annotated[
        str | None, typer.Argument(callback=text_value, help="The node's id, as `ryzanstein status` shows it.")
    ] = None,
    *,
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    direct: Annotated[
        str | None,
        typer.Option(callback=address_value, help="host:port of the node: undrain it directly, ending a quarantine."),
    ] = None,
    tls_dir: TlsDir = None,
) -> None:
    """Undrain a node: it takes work again."""
    if (node is None) == (direct is None):
        raise typer.BadParameter("give either a NODE or --direct")
    people, dialer = display.people(), dialer_in(tls_dir)
    try:
        if direct is not None:
            left = asyncio.run(undrain_node(direct, dialer))
            people.print(f"{direct} undrained" + (f", but not ready: {left}" if left else ""), markup=False)
        else:
            asyncio.run(withdraw_drain(orchestrator, str(node), dialer))
            people.print(f"{node} takes work again", markup=False)
    except RyzansteinError as error:
        display.show_error(people, error)
        raise typer.Exit(1) from None


async def withdraw_drain(orchestrator: str, node_id: str, dialer: Dialer = PLAIN) -> None:
    """Returns when the drain request is withdrawn.

    Raises RyzansteinError, NOT_FOUND if the node is not a member.
    """
    async with dialer.open(orchestrator, ORCHESTRATOR) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        await answered(stub.UndrainNode(orchestrator_pb2.UndrainNodeRequest(node_id=node_id), timeout=_TIMEOUT_S))


async def undrain_node(address: str, dialer: Dialer = PLAIN) -> str:
    """Undrains a node. Returns what still keeps it from taking generations, or an empty string."""
    async with dialer.open(address, ANY_NODE) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = await answered(stub.Undrain(worker_pb2.UndrainRequest(), timeout=_TIMEOUT_S))
    return answer.reason


async def request_drain(orchestrator: str, node_id: str, dialer: Dialer = PLAIN, *, below_min: bool = False) -> None:
    """Returns when the drain request is recorded.

    Raises RyzansteinError, NOT_FOUND if the node is not a member, FAILED_PRECONDITION if a deployment would keep fewer ready
    nodes than it states, unless `below_min`.
    """
    async with dialer.open(orchestrator, ORCHESTRATOR) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        await answered(
            stub.DrainNode(orchestrator_pb2.DrainNodeRequest(node_id=node_id, below_min=below_min), timeout=_TIMEOUT_S)
        )


async def drain_node(address: str, grace_s: float, dialer: Dialer = PLAIN) -> int:
    """Drains a node and returns how many generations had not ended.

    Returns when the node's work is done or the grace has passed.
    """
    grace = Duration()
    grace.FromNanoseconds(int(grace_s * 1e9))
    async with dialer.open(address, ANY_NODE) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = await answered(stub.Drain(worker_pb2.DrainRequest(grace=grace), timeout=grace_s + _TIMEOUT_S))
    return answer.unfinished
