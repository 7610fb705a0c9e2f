"""`ryzanstein drain NODE`: asks the orchestrator that a node finishes its work and takes no more."""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
import typer

from ryzanstein.cli import display
from ryzanstein.cli.defaults import ORCHESTRATOR_ADDRESS
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import orchestrator_pb2, orchestrator_pb2_grpc


def drain(
    node: Annotated[str, typer.Argument(help="The node's id, as `ryzanstein status` shows it.")],
    orchestrator: Annotated[str, typer.Option(help="host:port of the orchestrator.")] = ORCHESTRATOR_ADDRESS,
) -> None:
    """Let a node finish its work and take no more."""
    people = display.people()
    try:
        asyncio.run(request_drain(orchestrator, node))
    except RyzansteinError as error:
        display.show_error(people, error)
        raise typer.Exit(1) from None
    people.print(f"{node} drains", markup=False)


async def request_drain(orchestrator: str, node_id: str, timeout_s: float = 10.0) -> None:
    """Returns when the wish is recorded. Raises RyzansteinError, NOT_FOUND for a node that is no member."""
    async with open_channel(orchestrator) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        try:
            await stub.DrainNode(orchestrator_pb2.DrainNodeRequest(node_id=node_id), timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from failure
