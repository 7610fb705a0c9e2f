"""Access while keys are introduced: who sends none is let in as before."""

from __future__ import annotations

from ryzanstein.auth.caller import Caller
from ryzanstein.auth.credential import Credential
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.access.authenticator import Anonymous, Authenticator


class OptionalKeys:
    """Lets callers in without a credential, as `Anonymous` does; a bad credential is refused.

    It protects nothing: a caller without a key may name any tenant. The metric of outcomes counts such callers.
    """

    is_open = True

    def __init__(self, required: Authenticator) -> None:
        self._required, self._anonymous = required, Anonymous()

    def authenticate(self, credential: Credential) -> Caller:
        if credential.secret or credential.fault is not None:
            return self._required.authenticate(credential)
        return self._anonymous.authenticate(credential)

    def ended(self, caller: Caller) -> RyzansteinError | None:
        return self._required.ended(caller) if caller.key_id else None
