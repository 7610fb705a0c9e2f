"""Who sent a request: the interface, and the answer where there are no keys."""

from __future__ import annotations

from typing import Protocol

from ryzanstein.auth.caller import ANYONE, Caller
from ryzanstein.auth.credential import Credential
from ryzanstein.errors import RyzansteinError


class Authenticator(Protocol):
    """Says who sent a request. Synchronous, from memory alone, in less than 20 us: it never waits.

    What it knows is read again in the background.
    """

    @property
    def is_open(self) -> bool:
        """Whether callers without a credential are let in, so that the network is what protects the router."""
        ...

    def authenticate(self, credential: Credential) -> Caller:
        """Returns the caller.

        Raises the credential's fault, UNAUTHENTICATED, PERMISSION_DENIED TENANT_NOT_YOURS, or UNAVAILABLE
        KEYS_UNAVAILABLE.
        """
        ...

    def ended(self, caller: Caller) -> RyzansteinError | None:
        """Returns why a caller that was let in earlier would be refused now: revoked, expired; None if it would not."""
        ...


class Anonymous:
    """Lets everybody in, as the tenant that they name: for a loopback address, or behind a gateway that is trusted."""

    is_open = True

    def authenticate(self, credential: Credential) -> Caller:
        return Caller(tenant=credential.tenant) if credential.tenant else ANYONE

    def ended(self, caller: Caller) -> RyzansteinError | None:
        return None
