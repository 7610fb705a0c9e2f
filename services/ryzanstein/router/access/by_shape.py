"""Keys and tokens side by side: what a credential looks like decides who reads it. Nothing is tried in turn."""

from __future__ import annotations

from typing import Protocol

from ryzanstein.auth import refusals
from ryzanstein.auth.caller import Caller
from ryzanstein.auth.credential import Credential
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.access.telemetry import TOKEN_IDS


class SecretReader(Protocol):
    """Knows callers by secrets of one kind."""

    def authenticate(self, credential: Credential) -> Caller: ...

    def ended(self, caller: Caller) -> RyzansteinError | None: ...


class ByShape:
    """Gives three parts with dots between them to `tokens`, and everything else to `keys`, if there are any."""

    is_open = False

    def __init__(self, tokens: SecretReader, keys: SecretReader | None) -> None:
        self._tokens, self._keys = tokens, keys

    def authenticate(self, credential: Credential) -> Caller:
        if credential.fault is not None:
            raise credential.fault.again()
        if not credential.secret:
            raise refusals.key_missing()
        if credential.secret.count(".") == 2:
            return self._tokens.authenticate(credential)
        if self._keys is None:
            raise refusals.key_invalid()
        return self._keys.authenticate(credential)

    def ended(self, caller: Caller) -> RyzansteinError | None:
        if caller.key_id.startswith(TOKEN_IDS):
            return self._tokens.ended(caller)
        return refusals.key_revoked() if self._keys is None else self._keys.ended(caller)
