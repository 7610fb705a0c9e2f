"""What is kept of keys, and who sent a key: values that change only as a whole."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ryzanstein.auth import refusals
from ryzanstein.auth.caller import Caller, Scope
from ryzanstein.auth.key_form import DIGEST_CHARS, ApiKey
from ryzanstein.auth.tenants import DEFAULT_RULES, EVERY_OTHER, TenantRules
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import MAX_PRIORITY

MAX_KEYS = 100_000
MAX_TENANTS = 10_000


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is kept of a key. `digest` is the SHA-256 of its secret; times are Unix seconds.

    `models` are those that it may use; None: all. `expires`: None: never.
    """

    key_id: str
    digest: str = field(repr=False)
    tenant: str
    scopes: frozenset[Scope]
    models: frozenset[str] | None = None
    max_priority: int = MAX_PRIORITY
    created: float = 0.0
    expires: float | None = None
    note: str = ""

    def may_act_for(self, tenant: str) -> bool:
        """Whether the key may be used in the name of a tenant."""
        return tenant == self.tenant or Scope.ACT_AS in self.scopes


_NOBODYS = KeyRecord("", "0" * DIGEST_CHARS, "", frozenset())
"""What the secret of an unknown id is compared with. No secret is known that has this digest."""


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """All keys and tenants at one moment. `revoked` has when each revoked key was, by id."""

    keys: Mapping[str, KeyRecord] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    tenants: Mapping[str, TenantRules] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    revoked: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def rules_of(self, tenant: str) -> TenantRules:
        """Returns the rules of a tenant: its own, those of every other one, or none at all."""
        return self.tenants.get(tenant) or self.tenants.get(EVERY_OTHER) or DEFAULT_RULES

    def find(self, text: str, now: float) -> KeyRecord:
        """Returns the record of a key. Raises KEY_INVALID, KEY_REVOKED or KEY_EXPIRED.

        An unknown id and a wrong secret cost the same and give the same answer. Only who has the
        secret learns that it was revoked or has expired.
        """
        key = ApiKey.parse(text)
        if key is None:
            raise refusals.key_invalid()
        record = self.keys.get(key.key_id, _NOBODYS)
        if not hmac.compare_digest(key.digest(), record.digest) or record is _NOBODYS:
            raise refusals.key_invalid()
        if (ended := self.ended(record, now)) is not None:
            raise ended
        return record

    def ended(self, record: KeyRecord, now: float) -> RyzansteinError | None:
        """Returns why a key is no longer accepted; None: it is."""
        if record.key_id in self.revoked:
            return refusals.key_revoked()
        return refusals.key_expired() if record.expires is not None and record.expires <= now else None

    def caller_of(self, record: KeyRecord, named: str = "") -> Caller:
        """Returns who sends this key, with the tenant that the request names or without one.

        Raises TENANT_NOT_YOURS if the key may not name it.
        """
        tenant = named or record.tenant
        if not record.may_act_for(tenant):
            raise refusals.tenant_not_yours()
        rules = self.rules_of(tenant)
        return Caller(
            tenant,
            record.key_id,
            record.scopes,
            record.models,
            min(record.max_priority, rules.max_priority),
            rules.cache_scope(tenant),
            record.expires,
        )
