"""`ryzanstein profile`: what all ranks of a node compute in some steps, in one file."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import grpc
import typer

from ryzanstein.cli import display
from ryzanstein.cli.access.dialing import TlsDir, dialer_in
from ryzanstein.cli.options import ORCHESTRATOR_ADDRESS, Orchestrator, address_value, text_value
from ryzanstein.cli.profile.merging import merge
from ryzanstein.cli.rollout.last_node import members
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import Dialer
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.survey.reach import ANY_NODE
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

_TIMEOUT_S = 180.0


def profile(
    node: Annotated[
        str | None, typer.Argument(callback=text_value, help="The node's id, as `ryzanstein status` shows it.")
    ] = None,
    *,
    steps: Annotated[int, typer.Option(min=1, max=100, help="How many steps are recorded.")] = 20,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, max=1023, help="Only this rank; may be repeated. All of them by default.")
    ] = None,
    model: Annotated[str, typer.Option(callback=text_value, help="One of the node's models. Its first one by default.")] = "",
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The file, which must not be there.")] = Path(
        "profile.json"
    ),
    per_rank: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also write rank-N.json into this directory, for other tools.")
    ] = None,
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    direct: Annotated[
        str | None, typer.Option(callback=address_value, help="host:port of the node, without the orchestrator.")
    ] = None,
    tls_dir: TlsDir = None,
) -> None:
    """Record what all ranks of a node compute in the same steps, in one file for https://ui.perfetto.dev.

    Each rank has rows for its steps and collectives; an arrow leads from the rank that came last to each that waited for it.
    Steps take longer meanwhile. An idle node waits for work, 60 s at most.
    """
    if (node is None) == (direct is None):
        raise typer.BadParameter("give either a NODE or --direct")
    if output.exists():
        _end(f"{output} is there already")
    if not output.parent.is_dir():
        _end(f"there is no directory {output.parent}")
    people, dialer = display.people(), dialer_in(tls_dir)
    request = pb.RecordProfileRequest(ranks=rank or (), steps=steps, model=model)
    try:
        with display.waiting(people, f"waiting for {steps} steps"):
            traces = asyncio.run(_recorded(node, direct, orchestrator, dialer, request))
        _write(output, per_rank, traces)
    except RyzansteinError as error:
        display.show_error(people, error)
        raise typer.Exit(1) from None
    except ValueError as error:
        _end(str(error))
    except OSError as error:
        _end(f"{error.filename or output} cannot be written: {error.strerror}")


async def _recorded(
    node: str | None, direct: str | None, orchestrator: str, dialer: Dialer, request: pb.RecordProfileRequest
) -> Mapping[int, bytes]:
    address = direct or await _address(orchestrator, str(node), dialer)
    parts: dict[int, bytearray] = defaultdict(bytearray)
    async with dialer.open(address, ANY_NODE) as channel:
        try:
            async for part in WorkerServiceStub(channel).RecordProfile(request, timeout=_TIMEOUT_S):
                parts[part.rank] += part.part
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from failure
    return {rank: bytes(trace) for rank, trace in parts.items()}


async def _address(orchestrator: str, node: str, dialer: Dialer) -> str:
    known = {each.node_id: each for each in await members(orchestrator, dialer)}
    if node not in known:
        _end(f"no node is called {node}: there are {', '.join(sorted(known)) or 'none'}")
    return known[node].address_with(tls=dialer.secure) or known[node].address


def _write(output: Path, per_rank: Path | None, traces: Mapping[int, bytes]) -> None:
    if per_rank is not None:
        per_rank.mkdir(parents=True, exist_ok=True)
        for rank, trace in traces.items():
            (per_rank / f"rank-{rank}.json").write_bytes(trace)
    with output.open("xb") as file:
        try:
            merged = merge(traces, file)
        except ValueError:
            output.unlink()
            raise
        size = file.tell()
    ranks = "1 rank" if len(merged.ranks) == 1 else f"{len(merged.ranks)} ranks"
    what = f"{merged.num_steps} steps of {ranks}, {merged.num_collectives} collectives"
    text = f"{output}: {what}, {display.binary_bytes(size)}; open it at https://ui.perfetto.dev"
    display.people().print(text, markup=False, soft_wrap=True)


def _end(line: str) -> None:
    display.people().print(line, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
