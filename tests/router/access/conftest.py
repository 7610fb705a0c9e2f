"""A router's access, opened as the router opens it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.auth.caller import Caller
from ryzanstein.auth.credential import Credential
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.access.telemetry import outcome_of
from ryzanstein.router.authentication import OpenAccess, open_authenticator
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.telemetry import RouterTelemetry


@dataclass
class Access:
    """Opened access and its metrics."""

    opened: OpenAccess
    telemetry: RouterTelemetry

    def caller(self, secret: str, tenant: str = "") -> Caller:
        return self.opened.authenticator.authenticate(Credential(secret, tenant))

    def outcome(self, secret: str) -> str:
        try:
            return outcome_of(self.caller(secret))
        except RyzansteinError as error:
            return outcome_of(error)

    def ended(self, caller: Caller) -> str:
        error = self.opened.authenticator.ended(caller)
        return "" if error is None else error.reason

    def value(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(f"ryzanstein_router_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def access_of(settings: RouterSettings) -> AsyncIterator[Access]:
    telemetry = RouterTelemetry()
    async with open_authenticator(settings, telemetry) as opened:
        yield Access(opened, telemetry)
    await telemetry.background.close()


@pytest.fixture(name="access_of")
def access_of_fixture() -> Callable[[RouterSettings], Any]:
    return access_of


@pytest.fixture
async def open_access(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Access]]]:
    """Opens access with settings; all is closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_access(**settings: Any) -> Access:
            return await stack.enter_async_context(access_of(RouterSettings(**{"state_dir": tmp_path / "state", **settings})))

        yield open_access


@pytest.fixture
def command() -> Callable[..., str]:
    """Runs `ryzanstein keys` as a process; what it prints."""

    def run(*words: object, given: str = "") -> str:
        program = Path(sys.executable).with_name("ryzanstein")
        done = subprocess.run(
            [program, "keys", *map(str, words)],
            input=given,
            env={name: value for name, value in os.environ.items() if not name.startswith("RYZANSTEIN_")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
