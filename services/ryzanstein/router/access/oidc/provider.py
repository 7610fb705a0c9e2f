"""Fetches the keys of an OpenID provider. Blocking, with bounds on time and size: for a thread."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.error import URLError

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from ryzanstein.router.access.oidc.urls import is_secure

_DISCOVERY = "/.well-known/openid-configuration"
_WAIT_S, _WHOLE_S = 5.0, 10.0
_MOST_BYTES, _PIECE = 2**20, 2**16
_MOST_KEYS = 100
_LEAST_RSA_BITS = 2048
_ALGORITHMS: Mapping[tuple[str, str | None], str] = MappingProxyType(
    {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
)
"""The one algorithm that a key may be used with, by its type and curve. A token does not choose."""


class ProviderError(Exception):
    """The provider cannot be reached, or does not answer with keys. The message has nothing of its answer."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key that verifies tokens, and the text that it was read from."""

    jwk: PyJWK
    text: str


class Provider:
    """The provider of an issuer, whose discovery document says where its keys are."""

    def __init__(self, issuer: str) -> None:
        self._issuer = issuer
        self._keys_url = ""
        # A proxy of the environment may lead to a provider elsewhere, never to one on this machine.
        proxies: dict[str, str] | None = None if issuer.startswith("https:") else {}
        self._opener = urllib.request.build_opener(_SecureRedirects, urllib.request.ProxyHandler(proxies))

    def keys(self) -> dict[str, SigningKey]:
        """Returns the keys that sign tokens, by their ids. Raises ProviderError."""
        if not self._keys_url:
            self._keys_url = self._discovered()
        try:
            found = self._json(self._keys_url).get("keys")
            if not isinstance(found, list) or len(found) > _MOST_KEYS:
                raise ProviderError(f"{self._keys_url}: has no list of at most {_MOST_KEYS} keys")
            keys = {each["kid"]: key for each in found if (key := _signing_key(each)) is not None}
        except ProviderError:
            self._keys_url = ""  # perhaps it has moved
            raise
        if not keys:
            raise ProviderError(f"{self._keys_url}: has no key for {', '.join(_ALGORITHMS.values())} with an id")
        return keys

    def _discovered(self) -> str:
        url = self._issuer.rstrip("/") + _DISCOVERY
        document = self._json(url)
        if document.get("issuer") != self._issuer:
            raise ProviderError(f"{url}: is of another issuer")
        keys_url = document.get("jwks_uri")
        if not isinstance(keys_url, str) or not is_secure(keys_url):
            raise ProviderError(f"{url}: jwks_uri is no https address")
        return keys_url

    def _json(self, url: str) -> dict[str, Any]:
        try:
            body = self._get(url)
            document = json.loads(body)
        except (URLError, OSError, TimeoutError) as error:
            raise ProviderError(f"{url}: {getattr(error, 'reason', None) or error}") from None
        except Exception as error:  # the library has errors of its own for lines that are no HTTP
            raise ProviderError(f"{url}: does not answer with JSON: {type(error).__name__}") from None
        if not isinstance(document, dict):
            raise ProviderError(f"{url}: does not answer with an object")
        return document

    def _get(self, url: str) -> bytes:
        """Returns the body. A server that sends it drop by drop is given up."""
        ends_at = time.monotonic() + _WHOLE_S
        request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "ryzanstein"})
        with self._opener.open(request, timeout=_WAIT_S) as answer:
            body = bytearray()
            while piece := answer.read1(_PIECE):
                body += piece
                if len(body) > _MOST_BYTES:
                    raise OSError(f"answers with more than {_MOST_BYTES} bytes")
                if time.monotonic() > ends_at:
                    raise TimeoutError(f"takes longer than {_WHOLE_S:.0f} s")
        return bytes(body)


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        if not is_secure(newurl):
            raise URLError("redirects to what is no https address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _signing_key(data: Any) -> SigningKey | None:
    """Returns a key that may sign tokens; None for one of another kind, a weak one, and one that has its private part."""
    if not isinstance(data, dict) or not isinstance(data.get("kid"), str) or "d" in data or data.get("use", "sig") != "sig":
        return None
    algorithm = _ALGORITHMS.get((str(data.get("kty")), None if data.get("kty") == "RSA" else data.get("crv")))
    if algorithm is None or data.get("alg", algorithm) != algorithm:
        return None
    try:
        key = PyJWK(data, algorithm)
        weak = algorithm == "RS256" and key.key.key_size < _LEAST_RSA_BITS
    except (PyJWTError, ValueError, TypeError, KeyError):
        return None
    return None if weak else SigningKey(key, json.dumps(data, sort_keys=True))
