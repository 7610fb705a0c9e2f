"""The counts of months in the memory of one router, which are lost when it stops."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ryzanstein.router.access.limits.usage import (
    MAX_TENANTS,
    NOTHING,
    OTHER_TENANTS,
    UsageCount,
    UsageReport,
    UsageRow,
    this_month,
)

_MOST_KEPT = 20_000
_MONTHS = 2


class MemoryUsage:
    """A `UsageBook` of this process. It knows the last generations that were reported."""

    def __init__(self) -> None:
        self._counted: OrderedDict[str, UsageCount] = OrderedDict()
        self._months: OrderedDict[str, dict[str, UsageCount]] = OrderedDict()

    async def write(self, reports: Sequence[UsageReport]) -> dict[str, tuple[str, int]]:
        month = this_month()
        tenants = self._months.setdefault(month, {})
        for report in reports:
            before = self._counted.pop(report.generation_id, report.known)
            new = report.count.beyond(before)
            if report.count != NOTHING:
                self._counted[report.generation_id] = before.plus(new)
            if new != NOTHING:
                name = report.tenant if report.tenant in tenants or len(tenants) < MAX_TENANTS else OTHER_TENANTS
                tenants[name] = tenants.get(name, NOTHING).plus(new)
        while len(self._counted) > _MOST_KEPT:
            self._counted.popitem(last=False)
        while len(self._months) > _MONTHS:
            self._months.popitem(last=False)
        return {report.tenant: (month, tenants.get(report.tenant, NOTHING).tokens) for report in reports}

    async def total(self, tenant: str) -> tuple[str, int]:
        month = this_month()
        return month, self._months.get(month, {}).get(tenant, NOTHING).tokens

    async def rows(self, month: str, tenant: str | None) -> list[UsageRow]:
        named = sorted(self._months.get(month, {}).items())
        return [UsageRow(name, month, count) for name, count in named if tenant in (None, name)]

    async def attend(self) -> int:
        return 1

    async def close(self) -> None: ...
