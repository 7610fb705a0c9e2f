"""Consoles as processes, and a router that answers what a test writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ryzanstein.lab.pages.console_process import ConsoleProcess
from ryzanstein.lab.pages.scripted_router import Script, ScriptedRouter


@pytest.fixture(scope="module")
def _router() -> Iterator[ScriptedRouter]:
    made = ScriptedRouter(Script())
    yield made
    made.close()


@pytest.fixture
def router(_router: ScriptedRouter) -> Iterator[ScriptedRouter]:
    """A router that knows nothing of the test before."""
    _router.script = Script()
    _router.sessions.clear()
    yield _router
    _router.script.step_s = 0


@pytest.fixture
def script(router: ScriptedRouter) -> Script:
    return router.script


@pytest.fixture(scope="module")
def shared_console(_router: ScriptedRouter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    """A console of the scripted router, for tests that leave it as it was."""
    made = ConsoleProcess(tmp_path_factory.mktemp("console"), _router.address)
    yield made
    made.stop()


@pytest.fixture
def start_console(tmp_path: Path) -> Iterator[Callable[..., ConsoleProcess]]:
    """Starts consoles, and ends them."""
    started: list[ConsoleProcess] = []

    def start(routers: str, *flags: str, **more: str) -> ConsoleProcess:
        started.append(ConsoleProcess(tmp_path, routers, *flags, **more))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def console(router: ScriptedRouter, start_console: Callable[..., ConsoleProcess]) -> ConsoleProcess:
    """A console of the scripted router."""
    return start_console(router.address)
