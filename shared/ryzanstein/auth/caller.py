"""The one value that says who calls, and the checks that need nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from ryzanstein import errors
from ryzanstein.auth import refusals


class Scope(StrEnum):
    """What a key may be used for.

    `infer` generates, embeds and tokenizes; `sessions` reads and deletes conversations and kept
    responses; `usage` reads what the tenant used; `status` and `metrics` read what the router reports
    of itself; `debug` reads where its threads and the requests of all tenants are; `adapters` has nodes
    load and unload adapters; `act_as` names the tenant of each request, as a gateway does.
    """

    INFER = "infer"
    SESSIONS = "sessions"
    USAGE = "usage"
    STATUS = "status"
    METRICS = "metrics"
    DEBUG = "debug"
    ADAPTERS = "adapters"
    ACT_AS = "act_as"


EVERYTHING = frozenset(Scope)
DEFAULT_SCOPES = frozenset({Scope.INFER, Scope.SESSIONS, Scope.USAGE})
"""What a new key may do unless its scopes are given."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as its credential says.

    `tenant` owns what the request makes; it is empty only without keys, when nobody was named.
    `key_id` is the public id of the key, `jwt:SUBJECT`, or empty. `models` are the models that it may
    use; None: all. `max_priority` bounds a request's priority, `MAX_PRIORITY` of requests. Requests of
    one `cache_scope` share prefixes in the KV cache; it is empty only without keys. `ends` is when
    the credential expires, in Unix seconds.
    """

    tenant: str = ""
    key_id: str = ""
    scopes: frozenset[Scope] = EVERYTHING
    models: frozenset[str] | None = None
    max_priority: int = 10
    cache_scope: str = ""
    ends: float | None = None

    def check_scope(self, scope: Scope | None) -> None:
        """Raises PERMISSION_DENIED SCOPE_MISSING if the caller has not this scope; None: any caller may."""
        if scope is not None and scope not in self.scopes:
            raise refusals.scope_missing(scope)

    def may_use(self, model: str) -> bool:
        """Whether the caller may use this model."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raises NOT_FOUND for a model that the caller may not use, as for one that is not served."""
        if not self.may_use(model):
            raise errors.not_found("model", model)

    def check_priority(self, priority: int) -> None:
        """Raises PERMISSION_DENIED PRIORITY_NOT_ALLOWED for a priority above the caller's ceiling."""
        if priority > self.max_priority:
            raise refusals.priority_not_allowed(priority, self.max_priority)


ANYONE = Caller()
"""Who calls where no keys are and no tenant is named."""


def tenant_digest(tenant: str) -> str:
    """Returns 16 hexadecimal digits that stand for a tenant in the names of what it owns."""
    return blake2b(tenant.encode(), digest_size=8).hexdigest()


def read_scopes(names: Iterable[str]) -> frozenset[Scope]:
    """Returns the scopes of these names. Raises ValueError for one that does not exist."""
    given = list(names)
    if unknown := sorted(set(given) - {scope.value for scope in Scope}):
        raise ValueError(f"no such scope: {unknown[0][:64]!r}; scopes are {', '.join(Scope)}")
    return frozenset(map(Scope, given))
