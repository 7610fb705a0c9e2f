"""The metrics of limits and usage."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from ryzanstein.router.access.limits.bounds import LimitKind
from ryzanstein.router.access.limits.usage import UsageCount
from ryzanstein.router.telemetry import MOST_TENANTS, OTHER_TENANTS

MAX_TOKENS = "max_tokens"


class LimitMetrics:
    """Built once with the router's registry. The first hundred tenants have series of their own, for as long as it runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "ryzanstein_router_tenant_tokens_total",
            "Tokens that tenants used, by kind: prompt, generated; the first hundred tenants, then other",
            ["tenant", "kind"],
            registry=registry,
        )
        limited = Counter(
            "ryzanstein_router_limited_total", "Requests refused by a limit of their tenant", ["limit"], registry=registry
        )
        kinds = [kind.label for kind in LimitKind if kind]
        self._limited = {label: limited.labels(label) for label in (*kinds, MAX_TOKENS)}
        self.degraded = Gauge(
            "ryzanstein_router_limits_degraded",
            "1: limits are enforced without their store, by this router's share",
            registry=registry,
        )
        self.holds = Gauge(
            "ryzanstein_router_holds", "Generations that hold a part of their tenant's limits", registry=registry
        )
        self.backlog = Gauge(
            "ryzanstein_router_usage_backlog", "Reports of usage that the store does not have yet", registry=registry
        )
        self._of_tenant: dict[str, tuple[Callable[[float], None], Callable[[float], None]]] = {}

    def used(self, tenant: str, more: UsageCount) -> None:
        """Counts tokens."""
        prompt, generated = self._series(tenant)
        if more.prompt:
            prompt(more.prompt)
        if more.generated:
            generated(more.generated)

    def refused(self, label: str) -> None:
        """Counts a refusal by a limit."""
        self._limited[label].inc()

    def _series(self, tenant: str) -> tuple[Callable[[float], None], Callable[[float], None]]:
        series = self._of_tenant.get(tenant)
        if series is not None:
            return series
        label = tenant if len(self._of_tenant) < MOST_TENANTS else OTHER_TENANTS
        series = (self._tokens.labels(label, "prompt").inc, self._tokens.labels(label, "generated").inc)
        if label == tenant:
            self._of_tenant[tenant] = series
        return series
