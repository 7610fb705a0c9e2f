"""API keys: who sends one, from the keys that the router holds."""

from __future__ import annotations

import time
from collections.abc import Callable

from ryzanstein.auth import refusals
from ryzanstein.auth.caller import Caller
from ryzanstein.auth.credential import Credential
from ryzanstein.auth.keys.records import KeySnapshot
from ryzanstein.auth.tenants import TenantLimits, TenantRules
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.access.stores.source import HeldKeys


class Keys:
    """Knows callers by their API keys. Whoever sends none is refused."""

    is_open = False

    def __init__(self, held: HeldKeys, clock: Callable[[], float] = time.time) -> None:
        self._held, self._clock = held, clock

    def authenticate(self, credential: Credential) -> Caller:
        if credential.fault is not None:
            raise credential.fault.again()
        if not credential.secret:
            raise refusals.key_missing()
        snapshot = self._trusted()
        return snapshot.caller_of(snapshot.find(credential.secret, self._clock()), credential.tenant)

    def ended(self, caller: Caller) -> RyzansteinError | None:
        """Returns why a caller with a key would be refused now; also when its key is now of another tenant."""
        if not self._held.are_trusted:
            return refusals.keys_unavailable()
        snapshot = self._held.snapshot
        record = snapshot.keys.get(caller.key_id)
        if record is None or not record.may_act_for(caller.tenant):
            return refusals.key_revoked()
        return snapshot.ended(record, self._clock())

    def rules_of(self, tenant: str) -> TenantRules:
        """Returns the rules of a tenant, as the keys that are held now say."""
        return self._held.snapshot.rules_of(tenant)

    def limits_of(self, tenant: str) -> TenantLimits:
        """Returns the limits of a tenant, as the keys that are held now say."""
        return self.rules_of(tenant).limits

    def _trusted(self) -> KeySnapshot:
        if not self._held.are_trusted:
            raise refusals.keys_unavailable()
        return self._held.snapshot
