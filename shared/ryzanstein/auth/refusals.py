"""The errors of access, see docs/reference/errors.md. None of them quotes a credential."""

from __future__ import annotations

from ryzanstein.errors import Code, RyzansteinError


def key_missing() -> RyzansteinError:
    return RyzansteinError(
        "no API key: send it as `Authorization: Bearer KEY` or in x-api-key", Code.UNAUTHENTICATED, "KEY_MISSING"
    )


def key_ambiguous() -> RyzansteinError:
    return RyzansteinError("two different credentials: send one", Code.UNAUTHENTICATED, "KEY_AMBIGUOUS")


def key_invalid() -> RyzansteinError:
    """One answer for a key that is malformed, unknown, or has the wrong secret: it tells a guesser nothing."""
    return RyzansteinError("the API key is not valid", Code.UNAUTHENTICATED, "KEY_INVALID")


def key_expired() -> RyzansteinError:
    return RyzansteinError("the API key has expired", Code.UNAUTHENTICATED, "KEY_EXPIRED")


def key_revoked() -> RyzansteinError:
    return RyzansteinError("the API key was revoked", Code.UNAUTHENTICATED, "KEY_REVOKED")


def keys_unavailable() -> RyzansteinError:
    """The keys are too old to be trusted. Never UNAUTHENTICATED: clients would drop a key that is valid."""
    return RyzansteinError("the keys cannot be read at the moment", Code.UNAVAILABLE, "KEYS_UNAVAILABLE", retry_after_s=1.0)


def scope_missing(scope: str) -> RyzansteinError:
    return RyzansteinError(f"the API key lacks the scope {scope!r}", Code.PERMISSION_DENIED, "SCOPE_MISSING", {"scope": scope})


def tenant_not_yours(field: str = "x-tenant-id") -> RyzansteinError:
    return RyzansteinError(f"{field}: names another tenant than the API key's", Code.PERMISSION_DENIED, "TENANT_NOT_YOURS")


def priority_not_allowed(priority: int, most: int) -> RyzansteinError:
    what = f"priority: must be at most {most} for this API key, got {priority}"
    return RyzansteinError(what, Code.PERMISSION_DENIED, "PRIORITY_NOT_ALLOWED", {"max_priority": str(most)})


def not_allowed() -> RyzansteinError:
    """A method or route that the table of access does not have."""
    return RyzansteinError("nobody may call this", Code.PERMISSION_DENIED, "NOT_ALLOWED")


def role_not_allowed(peer: str, method: str) -> RyzansteinError:
    what = f"{peer or 'a peer without an identity'} may not call {method}"
    return RyzansteinError(what, Code.PERMISSION_DENIED, "ROLE_NOT_ALLOWED", {"peer": peer, "method": method})


NOT_YOUR_NAME = "NOT_YOUR_NAME"


def not_your_name(name: str, peer: str) -> RyzansteinError:
    what = f"{name[:128]!r} is not the name in the certificate of {peer}"
    return RyzansteinError(what, Code.PERMISSION_DENIED, NOT_YOUR_NAME, {"peer": peer})


def peer_denied(peer: str) -> RyzansteinError:
    return RyzansteinError(f"the certificate of {peer} is denied", Code.PERMISSION_DENIED, "PEER_DENIED", {"peer": peer})


def rate_limited(
    quota: str, limit: float, remaining: int, reset: str, *, retry_after_s: float, tenant: str = ""
) -> RyzansteinError:
    """Returns the refusal of a request above a rate of its tenant.

    `quota` names the limit, `reset` says in how long nothing of it is used.
    """
    message = f"too many requests: {quota.replace('_', ' ')} is limited to {_number(limit)}"
    metadata = _of_quota(tenant, quota, limit, remaining) | {"reset": reset}
    return RyzansteinError(message, Code.RESOURCE_EXHAUSTED, "RATE_LIMITED", metadata, retry_after_s=retry_after_s)


def quota_exhausted(quota: str, limit: int, remaining: int, *, tenant: str = "") -> RyzansteinError:
    """Returns the refusal of a request above what its tenant may use. Trying again soon is of no use, so it says no time."""
    message = f"the quota is used up: {quota.replace('_', ' ')} is limited to {limit}, {remaining} are left"
    return RyzansteinError(message, Code.RESOURCE_EXHAUSTED, "QUOTA_EXHAUSTED", _of_quota(tenant, quota, limit, remaining))


def _number(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"


def _of_quota(tenant: str, quota: str, limit: float, remaining: int) -> dict[str, str]:
    return {"subject": f"tenant:{tenant}", "quota": quota, "limit": _number(limit), "remaining": str(remaining)}
