"""Tokens of an OpenID provider in place of keys: JWT that are verified with the issuer's keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any

import jwt
import structlog
from jwt.exceptions import ExpiredSignatureError, PyJWTError

from ryzanstein.auth import refusals
from ryzanstein.auth.caller import DEFAULT_SCOPES, Caller, Scope
from ryzanstein.auth.credential import Credential
from ryzanstein.auth.tenants import EVERY_OTHER, TenantRules, tenant_fault
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.access.oidc.issuer import IssuerKeys
from ryzanstein.router.access.oidc.provider import SigningKey
from ryzanstein.router.access.telemetry import TOKEN_IDS

log = structlog.get_logger(__name__)

LEEWAY_S = 60.0
MAX_REMEMBERED = 10_000
_LOG_EVERY_S = 10.0
_SCOPE_PREFIX = "ryzanstein:"
_REQUIRED = ["exp", "iss", "aud", "sub"]
_NO_TOKEN = (PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Whose tokens are accepted, for whom they must be, and which claim names the tenant."""

    issuer: str
    audience: str
    tenant_claim: str


@dataclass(frozen=True, slots=True)
class _Verified:
    """What a verified token says, and the id of the key that verified it."""

    tenant: str
    subject: str
    scopes: frozenset[Scope]
    ends: float
    kid: str


class Tokens:
    """Knows callers by their tokens. One that was verified is remembered, by its digest, until it ends."""

    def __init__(
        self,
        terms: TokenTerms,
        issuer: IssuerKeys,
        rules_of: Callable[[str], TenantRules],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._terms, self._issuer, self._rules_of, self._clock = terms, issuer, rules_of, clock
        self._remembered: dict[bytes, _Verified] = {}
        self._remembered_by: Mapping[str, SigningKey] = issuer.keys
        self._logged_at = 0.0

    def authenticate(self, credential: Credential) -> Caller:
        if not self._issuer.are_trusted:
            raise refusals.keys_unavailable()
        if self._remembered_by is not self._issuer.keys:
            self._forget_others()
        digest = sha256(credential.secret.encode()).digest()
        verified = self._remembered.get(digest)
        if verified is None:
            verified = self._verified(credential.secret)
            self._remember(digest, verified)
        elif verified.ends <= self._clock():
            del self._remembered[digest]
            raise refusals.key_expired()
        return self._caller(verified, credential.tenant)

    def ended(self, caller: Caller) -> RyzansteinError | None:
        """Returns KEY_EXPIRED for a token that is over. An issuer tells nobody that it revoked one."""
        return refusals.key_expired() if caller.ends is not None and caller.ends <= self._clock() else None

    def _caller(self, verified: _Verified, named: str) -> Caller:
        tenant = named or verified.tenant
        if tenant != verified.tenant and Scope.ACT_AS not in verified.scopes:
            raise refusals.tenant_not_yours()
        rules = self._rules_of(tenant)
        return Caller(
            tenant=tenant,
            key_id=verified.subject,
            scopes=verified.scopes,
            max_priority=rules.max_priority,
            cache_scope=rules.cache_scope(tenant),
            ends=verified.ends,
        )

    def _verified(self, token: str) -> _Verified:
        try:
            header = jwt.get_unverified_header(token)
            kid = str(header.get("kid", ""))
            key = self._issuer.keys.get(kid)
            if key is None:
                if kid:
                    self._issuer.want()
                raise ValueError("names no key of the issuer")
            if "crit" in header or "b64" in header:
                raise ValueError("has a header that is not understood")
            # The algorithm is that of the key: PyJWT refuses a token that names another one.
            claims = jwt.decode(
                token,
                key.jwk,
                [key.jwk.algorithm_name],
                {"require": _REQUIRED},
                audience=self._terms.audience,
                issuer=self._terms.issuer,
                leeway=LEEWAY_S,
            )
            return self._read(claims, kid)
        except ExpiredSignatureError:
            raise refusals.key_expired() from None
        except _NO_TOKEN as error:
            self._note(error)
            raise refusals.key_invalid() from None

    def _read(self, claims: Mapping[str, Any], kid: str) -> _Verified:
        tenant = claims.get(self._terms.tenant_claim)
        if tenant_fault(tenant) or tenant == EVERY_OTHER:
            raise ValueError(f"the claim {self._terms.tenant_claim} names no tenant")
        return _Verified(str(tenant), _subject(claims["sub"]), _scopes(claims), float(claims["exp"]) + LEEWAY_S, kid)

    def _remember(self, digest: bytes, verified: _Verified) -> None:
        if len(self._remembered) >= MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[digest] = verified

    def _forget_others(self) -> None:
        """Forgets tokens that another key verified than those that the issuer has now."""
        keys, before = self._issuer.keys, self._remembered_by
        same = {kid for kid, key in keys.items() if kid in before and key.text == before[kid].text}
        self._remembered = {digest: each for digest, each in self._remembered.items() if each.kid in same}
        self._remembered_by = keys

    def _note(self, error: Exception) -> None:
        """Logs now and then why tokens are refused, for who sets the provider up. Nothing of a token is in it."""
        if (now := time.monotonic()) - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            cause = str(error) if type(error) is ValueError else type(error).__name__
            log.info("token refused", cause=cause)


def _subject(subject: str) -> str:
    """Returns the id of the caller. A subject that is no short name is given by its digest."""
    return TOKEN_IDS + (
        blake2b(subject.encode(errors="replace"), digest_size=8).hexdigest() if tenant_fault(subject) else subject
    )


def _scopes(claims: Mapping[str, Any]) -> frozenset[Scope]:
    """Returns the scopes of ours in `scope` or `scp`, also as `ryzanstein:NAME`; those of a new key if there are none."""
    given = claims.get("scope", claims.get("scp", ""))
    names = given.split() if isinstance(given, str) else given if isinstance(given, list) else []
    ours = {name.removeprefix(_SCOPE_PREFIX) for name in names if isinstance(name, str)} & set(Scope)
    return frozenset(map(Scope, ours)) or DEFAULT_SCOPES
