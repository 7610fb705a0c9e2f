"""Opens what says who calls: the source of keys that the settings name, watched for as long as the router runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from ryzanstein import errors
from ryzanstein.auth.tenants import DEFAULT_RULES, NO_LIMITS, TenantLimits
from ryzanstein.process.hangup import hangups
from ryzanstein.process.service_process import BadSettingsError
from ryzanstein.router.access.authenticator import Anonymous, Authenticator
from ryzanstein.router.access.by_shape import ByShape, SecretReader
from ryzanstein.router.access.keys import Keys
from ryzanstein.router.access.optional import OptionalKeys
from ryzanstein.router.access.stores.file import FileKeys
from ryzanstein.router.access.stores.saved import SavedKeys
from ryzanstein.router.access.stores.source import HeldKeys, KeySource, KeysUnreadableError
from ryzanstein.router.access.stores.watch import KeyWatch
from ryzanstein.router.access.telemetry import KeyMetrics
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.storage.redis_url import address

log = structlog.get_logger(__name__)


def _no_limits(tenant: str) -> TenantLimits:
    return NO_LIMITS


@dataclass(frozen=True, slots=True)
class OpenAccess:
    """Who may call. `limits_of` has the limits of a tenant as they are now; it reads memory alone."""

    authenticator: Authenticator
    limits_of: Callable[[str], TenantLimits] = _no_limits


@asynccontextmanager
async def open_authenticator(settings: RouterSettings, telemetry: RouterTelemetry) -> AsyncIterator[OpenAccess]:
    """Yields who may call: everybody where the settings name no source of keys.

    Raises BadSettingsError when the keys file cannot be read. A Redis server that is away is not an error.
    """
    if settings.auth_mode == "off":
        yield OpenAccess(Anonymous())
        return
    metrics = KeyMetrics(telemetry.registry)
    async with AsyncExitStack() as stack:
        keys = await _keys(stack, settings, telemetry, metrics) if settings.has_keys else None
        tokens = await _tokens(stack, settings, telemetry, metrics, keys) if settings.oidc_issuer else None
        required = _required(keys, tokens)
        authenticator = required if settings.auth_mode == "required" else OptionalKeys(required)
        yield OpenAccess(authenticator, _no_limits if keys is None else keys.limits_of)


def _required(keys: Keys | None, tokens: SecretReader | None) -> Authenticator:
    if tokens is not None:
        return ByShape(tokens, keys)
    assert keys is not None, "settings allow no other auth without a source"
    return keys


async def _keys(stack: AsyncExitStack, settings: RouterSettings, telemetry: RouterTelemetry, metrics: KeyMetrics) -> Keys:
    """Returns the keys of the source that the settings name, with its watch running."""
    source = _source(settings)
    stack.push_async_callback(source.close)
    held = HeldKeys(settings.keys_max_age_s if settings.keys_redis else None)
    watch = KeyWatch(source, held, metrics)
    try:
        await watch.start()
    except KeysUnreadableError as error:
        if settings.keys_file is not None:
            raise BadSettingsError(f"keys_file: {error}") from None
        # Redis may come back. Until then callers get KEYS_UNAVAILABLE.
    stack.enter_context(hangups(watch.look_now))
    _supervise(stack, telemetry, "keys", watch.run)
    return Keys(held)


async def _tokens(
    stack: AsyncExitStack, settings: RouterSettings, telemetry: RouterTelemetry, metrics: KeyMetrics, keys: Keys | None
) -> SecretReader:
    """Returns the tokens of the issuer that the settings name, with its keys being fetched."""
    try:
        # An optional dependency: it is installed only where it is used.
        from ryzanstein.router.access.oidc.issuer import IssuerKeys
        from ryzanstein.router.access.oidc.provider import Provider
        from ryzanstein.router.access.oidc.tokens import Tokens, TokenTerms
    except ImportError as error:
        raise errors.failed_precondition(
            "OIDC_NOT_INSTALLED", f"oidc_issuer needs the PyJWT package: pip install ryzanstein[oidc] ({error})"
        ) from error
    issuer = IssuerKeys(Provider(settings.oidc_issuer), metrics)
    await issuer.start()
    _supervise(stack, telemetry, "oidc_keys", issuer.run)
    terms = TokenTerms(settings.oidc_issuer, settings.oidc_audience, settings.oidc_tenant_claim)
    return Tokens(terms, issuer, (lambda _: DEFAULT_RULES) if keys is None else keys.rules_of)


def _supervise(
    stack: AsyncExitStack, telemetry: RouterTelemetry, name: str, run: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    task = telemetry.background.supervise(name, run)
    stack.push_async_callback(asyncio.wait, [task])
    stack.callback(task.cancel)


def _source(settings: RouterSettings) -> KeySource:
    if settings.keys_file is not None:
        return FileKeys(settings.keys_file)
    try:
        # An optional dependency: it is installed only where it is used.
        from ryzanstein.auth.keys.redis_keys import RedisKeys
        from ryzanstein.router.access.stores.redis import RedisKeySource
    except ImportError as error:
        raise errors.failed_precondition(
            "REDIS_NOT_INSTALLED", f"keys_redis needs the redis package: pip install ryzanstein[redis] ({error})"
        ) from error
    url = settings.redis_url.get_secret_value()
    log.info("keys in Redis", address=address(url))
    return RedisKeySource(RedisKeys(url, settings.redis_prefix), SavedKeys(settings.state_dir / "keys-of-redis.toml"))
