"""Opens what says who calls: the source of keys that the settings name, watched for as long as the router runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from ryzanstein.auth.tenants import NO_LIMITS, TenantLimits
from ryzanstein.process.hangup import hangups
from ryzanstein.process.service_process import BadSettingsError
from ryzanstein.router.access.authenticator import Anonymous, Authenticator
from ryzanstein.router.access.keys import Keys
from ryzanstein.router.access.optional import OptionalKeys
from ryzanstein.router.access.stores.file import FileKeys
from ryzanstein.router.access.stores.source import HeldKeys, KeysUnreadableError
from ryzanstein.router.access.stores.watch import KeyWatch
from ryzanstein.router.access.telemetry import KeyMetrics
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.telemetry import RouterTelemetry

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

    Raises BadSettingsError when the keys file cannot be read.
    """
    if settings.auth_mode == "off":
        yield OpenAccess(Anonymous())
        return
    async with AsyncExitStack() as stack:
        keys = await _keys(stack, settings, telemetry)
        yield OpenAccess(keys if settings.auth_mode == "required" else OptionalKeys(keys), keys.limits_of)


async def _keys(stack: AsyncExitStack, settings: RouterSettings, telemetry: RouterTelemetry) -> Keys:
    assert settings.keys_file is not None
    held = HeldKeys()
    source = FileKeys(settings.keys_file)
    stack.push_async_callback(source.close)
    watch = KeyWatch(source, held, KeyMetrics(telemetry.registry))
    try:
        await watch.start()
    except KeysUnreadableError as error:
        raise BadSettingsError(f"keys_file: {error}") from None
    stack.enter_context(hangups(watch.look_now))
    watching = telemetry.background.supervise("keys", watch.run)
    stack.push_async_callback(asyncio.wait, [watching])
    stack.callback(watching.cancel)
    return Keys(held)
