"""What a request presents to say who it is from, read in the same way by every face.

It is in `authorization: Bearer KEY`, `x-api-key` or `api-key`, of which there may be several only if
they are equal. The tenant that a gateway names is beside it, in `x-tenant-id`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ryzanstein import errors
from ryzanstein.auth import refusals
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TENANT_ID, valid_tenant

AUTHORIZATION = "authorization"
KEY_HEADERS = ("x-api-key", "api-key")
MAX_CREDENTIAL_CHARS = 8192
"""Of a token; a key has 64."""
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request presents: a key or token, and a tenant that it names. Either is empty if there is none.

    `fault` is what is wrong with it. Who needs no key ignores it: many clients send one that means nothing.
    """

    secret: str = field(default="", repr=False)
    tenant: str = ""
    fault: RyzansteinError | None = None

    @classmethod
    def read(cls, headers: Iterable[tuple[str, str | bytes]], also: str = "") -> Credential:
        """Reads headers or metadata, of which names are in lower case.

        `also` is a key that came by another way, such as a WebSocket's subprotocol; a header wins. The
        fault is KEY_AMBIGUOUS for different keys or a repeated `authorization`, KEY_INVALID for what is
        no text of a key's. Raises INVALID_ARGUMENT for a tenant that is not valid or is named twice.
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
        if len(tenants) > 1:
            raise errors.invalid(TENANT_ID, "must be given once")
        keys |= set(bearers)
        secret, tenant = next(iter(keys), also), next(iter(tenants), "")
        if len(bearers) > 1 or len(keys) > 1:
            return cls("", tenant, refusals.key_ambiguous())
        if keys and not (0 < len(secret) <= MAX_CREDENTIAL_CHARS and secret.isascii() and secret.isprintable()):
            return cls("", tenant, refusals.key_invalid())
        return cls(secret, tenant)


def _bearer(value: str) -> str:
    """Returns the token of an `authorization`, empty for another scheme."""
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else ""


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
