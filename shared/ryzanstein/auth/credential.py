"""What a request presents to say who it is from, read in the same way by every face.

It is in `authorization: Bearer KEY`, `x-api-key` or `api-key`, of which there may be several only if
they are equal. The tenant that a gateway names is beside it, in `x-tenant-id`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ryzanstein.auth import refusals
from ryzanstein.generation.prompts import TENANT_ID, valid_tenant

AUTHORIZATION = "authorization"
KEY_HEADERS = ("x-api-key", "api-key")
MAX_CREDENTIAL_CHARS = 8192
"""Of a token; a key has 64."""
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request presents: a key or token, and a tenant that it names. Either is empty if there is none."""

    secret: str = field(default="", repr=False)
    tenant: str = ""

    @classmethod
    def read(cls, headers: Iterable[tuple[str, str | bytes]], also: str = "") -> Credential:
        """Reads headers or metadata, of which names are in lower case.

        `also` is a key that came by another way, such as a WebSocket's subprotocol; a header wins.
        Raises KEY_AMBIGUOUS for different keys or a repeated `authorization`, KEY_INVALID for one that
        is no text of a key's, and INVALID_ARGUMENT for a tenant that is not valid or is named twice.
        """
        bearers: list[str] = []
        keys: set[str] = set()
        tenants: set[str] = set()
        for name, value in headers:
            if name == AUTHORIZATION:
                bearers.append(_bearer(_text(value)))
            elif name in KEY_HEADERS:
                keys.add(_text(value).strip())
            elif name == TENANT_ID:
                tenants.add(valid_tenant(_text(value), ""))
        keys |= set(bearers)
        if len(bearers) > 1 or len(keys) > 1 or len(tenants) > 1:
            raise refusals.key_ambiguous() if len(tenants) < 2 else refusals.tenant_not_yours()
        secret = next(iter(keys), also)
        if len(secret) > MAX_CREDENTIAL_CHARS or not (secret.isascii() and (secret.isprintable() or not secret)):
            raise refusals.key_invalid()
        return cls(secret, next(iter(tenants), ""))


def _bearer(value: str) -> str:
    """Returns the token of an `authorization`. Raises KEY_INVALID for another scheme."""
    if value[: len(_SCHEME)].lower() != _SCHEME:
        raise refusals.key_invalid()
    return value[len(_SCHEME) :].strip()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
