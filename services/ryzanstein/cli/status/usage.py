"""`ryzanstein usage`: what tenants used in a month, and what they may use."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from ryzanstein.cli import display
from ryzanstein.cli.access.keyed_router import KeyFile, keyed_router
from ryzanstein.cli.access.router_trust import CaFile
from ryzanstein.cli.fitted_table import Column, FittedTable
from ryzanstein.cli.options import ROUTER_ADDRESS, Router, text_value
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.v1 import usage_pb2, usage_pb2_grpc

_TIMEOUT_S = 10.0
_LIMITS = ("requests_per_second", "burst", "tokens_per_minute", "concurrent", "tokens_per_month", "max_tokens", "sessions")


def usage(
    tenant: Annotated[str, typer.Option(callback=text_value, help="One tenant alone.")] = "",
    month: Annotated[str, typer.Option(callback=text_value, help="In UTC, such as 2026-11. By default this one.")] = "",
    *,
    router: Router = ROUTER_ADDRESS,
    key_file: KeyFile = None,
    ca: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what tenants used in a month: requests, tokens of prompts, generated tokens, and their limits."""
    try:
        rows = asyncio.run(_asked(keyed_router(router, key_file, ca), usage_pb2.GetUsageRequest(tenant=tenant, month=month)))
    except RyzansteinError as error:
        display.show_error(display.people(), error)
        raise typer.Exit(1) from None
    if as_json:
        display.print_json({"usage": [_document(row) for row in rows]})
    elif rows:
        display.output().print(_table(rows))
    else:
        display.people().print("no tenant used anything in that month")


async def _asked(router: KeyedRouter, request: usage_pb2.GetUsageRequest) -> list[usage_pb2.TenantUsage]:
    async with router.open() as channel:
        answer = await answered(usage_pb2_grpc.UsageServiceStub(channel).GetUsage(request, timeout=_TIMEOUT_S))
    return list(answer.rows)


def _table(rows: list[usage_pb2.TenantUsage]) -> FittedTable:
    table = FittedTable(
        f"usage of {rows[0].month}",
        Column("tenant", folds=True),
        Column("requests", 2),
        Column("prompt tokens", 3),
        Column("generated tokens", 4),
        Column("tokens"),
        Column("of the month's", 1),
    )
    for row in rows:
        tokens = row.prompt_tokens + row.generated_tokens
        month = str(row.limits.tokens_per_month) if row.limits.HasField("tokens_per_month") else "-"
        numbers = (row.requests, row.prompt_tokens, row.generated_tokens, tokens)
        table.add(row.tenant or "-", *map(str, numbers), month)
    return table


def _document(row: usage_pb2.TenantUsage) -> dict[str, Any]:
    """Returns a row for scripts. A limit that there is not is null."""
    limits = dict.fromkeys(_LIMITS) | {field.name: value for field, value in row.limits.ListFields() if field.name in _LIMITS}
    return {
        "tenant": row.tenant,
        "month": row.month,
        "requests": row.requests,
        "prompt_tokens": row.prompt_tokens,
        "generated_tokens": row.generated_tokens,
        "limits": {**limits, "hard_month": row.limits.hard_month},
    }
