"""The metrics of access: what the faces count of callers, and how fresh the keys are."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from ryzanstein.auth.caller import Caller
from ryzanstein.errors import RyzansteinError

KEY, TOKEN, ANONYMOUS = "key", "token", "anonymous"
LOADED, FAILED = "loaded", "failed"
TOKEN_IDS = "jwt:"
"""How the key ids of callers with a token begin."""


def outcome_of(result: Caller | RyzansteinError) -> str:
    """Returns the label of an authentication: by what the caller was let in, or the reason of the refusal in lower case."""
    if isinstance(result, RyzansteinError):
        return result.reason.lower()
    if not result.key_id:
        return ANONYMOUS
    return TOKEN if result.key_id.startswith(TOKEN_IDS) else KEY


class KeyMetrics:
    """The metrics of the sources of keys. Built once with the router's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        source = ["source"]
        self._keys = Gauge("ryzanstein_router_keys", "Known keys, revoked ones included", source, registry=registry)
        self._age = Gauge(
            "ryzanstein_router_keys_age_seconds", "Time since the keys were last seen to be current", source, registry=registry
        )
        self._reloads = Counter(
            "ryzanstein_router_keys_reloads_total",
            "Changes of a source of keys, by outcome",
            ["source", "outcome"],
            registry=registry,
        )

    def measure(self, source: str, age_s: Callable[[], float]) -> None:
        """Creates the series of a source."""
        self._age.labels(source).set_function(age_s)
        for outcome in (LOADED, FAILED):
            self._reloads.labels(source, outcome)

    def loaded(self, source: str, num_keys: int) -> None:
        self._reloads.labels(source, LOADED).inc()
        self._keys.labels(source).set(num_keys)

    def failed(self, source: str) -> None:
        self._reloads.labels(source, FAILED).inc()
