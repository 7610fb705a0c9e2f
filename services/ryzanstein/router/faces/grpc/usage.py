"""The gRPC face of what tenants used."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc

from ryzanstein.auth import refusals
from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.router.access.limits.allowance import TenantAllowance
from ryzanstein.router.access.limits.usage import UsageCount, UsageRow, checked_month
from ryzanstein.router.faces.grpc.call import Calls
from ryzanstein.v1 import usage_pb2 as pb
from ryzanstein.v1.usage_pb2_grpc import UsageServiceServicer
from ryzanstein.wire.requests import name_from_wire

_Context = grpc.aio.ServicerContext[Any, Any]


class UsageServicer(UsageServiceServicer):
    """`UsageService` over what a router counts."""

    def __init__(self, allowance: TenantAllowance, calls: Calls) -> None:
        self._allowance = allowance
        self._calls = calls

    async def GetUsage(self, request: pb.GetUsageRequest, context: _Context) -> pb.GetUsageResponse:
        with self._calls.call("GetUsage", context) as call:
            tenant, month = name_from_wire(request.tenant, "tenant"), checked_month(request.month)
            own = call.tenant
            if own and tenant not in ("", own):
                raise refusals.tenant_not_yours("tenant")
            wanted = tenant or own
            rows = await self._allowance.usage(month, wanted or None)
            if wanted and not rows:
                rows = [UsageRow(wanted, month, UsageCount())]
            return pb.GetUsageResponse(rows=[_row_to_wire(row, self._allowance.limits_of(row.tenant)) for row in rows])


def _row_to_wire(row: UsageRow, limits: TenantLimits) -> pb.TenantUsage:
    return pb.TenantUsage(
        tenant=row.tenant,
        month=row.month,
        requests=row.count.requests,
        prompt_tokens=row.count.prompt,
        generated_tokens=row.count.generated,
        limits=pb.UsageLimits(**{name: value for name, value in asdict(limits).items() if value is not None}),
    )
