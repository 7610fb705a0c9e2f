"""`ryzanstein audit`: what operators did at the orchestrator, newest first."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from ryzanstein.cli import display
from ryzanstein.cli.fitted_table import Column, FittedTable
from ryzanstein.cli.options import ORCHESTRATOR_ADDRESS, Orchestrator, text_value
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import PLAIN
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import ORCHESTRATOR
from ryzanstein.v1 import orchestrator_pb2, orchestrator_pb2_grpc

_TIMEOUT_S = 10.0
_PAGE = 500
_MOST = 100_000


def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="How many acts, the newest.")] = 50,
    method: Annotated[str, typer.Option(callback=text_value, help="Acts of this RPC alone, such as DeployModel.")] = "",
    target: Annotated[str, typer.Option(callback=text_value, help="Acts on models or nodes whose names begin so.")] = "",
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what operators did at the orchestrator: deployments and drains, newest first."""
    try:
        acts = asyncio.run(_asked(orchestrator, limit, method, target))
    except RyzansteinError as error:
        display.show_error(display.people(), error)
        raise typer.Exit(1) from None
    if as_json:
        display.print_json({"acts": [_document(act) for act in acts]})
    elif acts:
        display.output().print(_table(acts))
    else:
        display.people().print("no such act is recorded")


async def _asked(orchestrator: str, limit: int, method: str, target: str) -> list[orchestrator_pb2.AuditedAct]:
    """Returns the acts, page after page."""
    acts: list[orchestrator_pb2.AuditedAct] = []
    async with PLAIN.open(orchestrator, ORCHESTRATOR) as channel:
        stub, token = orchestrator_pb2_grpc.OrchestratorServiceStub(channel), ""
        while True:
            request = orchestrator_pb2.ListAuditRequest(
                page_size=min(_PAGE, limit - len(acts)), page_token=token, method=method, target_prefix=target
            )
            page = await answered(stub.ListAudit(request, timeout=_TIMEOUT_S))
            acts += page.acts
            token = page.next_page_token
            if not token or len(acts) >= limit:
                return acts


def _table(acts: list[orchestrator_pb2.AuditedAct]) -> FittedTable:
    table = FittedTable(
        "operators' acts",
        Column("time"),
        Column("actor", 1, folds=True),
        Column("via", 3, folds=True),
        Column("method"),
        Column("target", folds=True),
        Column("outcome"),
        Column("reason", 2, folds=True),
    )
    for act in acts:
        time = act.time.ToJsonString()[:19].replace("T", " ")
        table.add(time, act.actor or "-", act.via, act.method, act.target, act.outcome, act.reason or "-")
    return table


def _document(act: orchestrator_pb2.AuditedAct) -> dict[str, Any]:
    return {
        "id": act.id,
        "time": act.time.ToJsonString(),
        "actor": act.actor,
        "via": act.via,
        "method": act.method,
        "target": act.target,
        "outcome": act.outcome,
        "reason": act.reason,
        "request_id": act.request_id,
        "before": json.loads(act.before) if act.before else None,
        "after": json.loads(act.after) if act.after else None,
    }
