"""What clients are shown of their limits, and operators in metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.router.access.limits.bounds import TenantLevel, bounds_of
from ryzanstein.router.access.limits.metrics import LimitMetrics
from ryzanstein.router.access.limits.shown import duration, headers
from ryzanstein.router.access.limits.usage import UsageCount


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0005, "1ms"), (0.02, "20ms"), (1, "1s"), (1.2, "2s"), (59.5, "1m0s"), (360, "6m0s"), (3601, "1h0m1s")],
)
def test_times_are_written_as_clients_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_headers_of_a_bucket_that_is_half_empty() -> None:
    bounds = bounds_of(TenantLimits(requests_per_second=2, burst=10, tokens_per_minute=6000))
    assert headers(bounds, TenantLevel(2.5e6, 30e6)) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "3s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "3000",
        "x-ratelimit-reset-tokens": "30s",
    }
    assert headers(bounds, TenantLevel(1e9, 1e9))["x-ratelimit-remaining-tokens"] == "0"
    assert headers(bounds_of(TenantLimits(concurrent=1)), TenantLevel()) == {}


def test_the_first_hundred_tenants_keep_series_of_their_own() -> None:
    registry = CollectorRegistry()
    metrics = LimitMetrics(registry)
    for number in range(150):
        metrics.used(f"t{number}", UsageCount(1, 1, 2))
    metrics.used("t0", UsageCount(1, 1, 2))

    def value(tenant: str, kind: str) -> float | None:
        return registry.get_sample_value("ryzanstein_router_tenant_tokens_total", {"tenant": tenant, "kind": kind})

    assert (value("t0", "generated"), value("t99", "prompt"), value("t100", "prompt")) == (4, 1, None)
    assert value("other", "generated") == 100


def test_one_of_several_routers_gives_out_its_share() -> None:
    bounds = bounds_of(TenantLimits(requests_per_second=30, burst=9, concurrent=4, tokens_per_month=100)).share(3)
    assert bounds.requests is not None
    assert (bounds.requests.interval_us, bounds.requests.burst) == (100_000, 3)
    assert (bounds.concurrent, bounds.month) == (2, 100)
