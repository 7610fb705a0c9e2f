"""Each proxy's own checker accepts the configuration that it is started with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.router import proxies
from ryzanstein.lab.bench.router.proxies import PROXIES


async def check(name: str, folder: Path) -> tuple[int | None, str]:
    proxy = PROXIES[name]
    command = proxy.command(proxy.check, 50999, 50998, folder)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    message, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, message.decode()


def installed(name: str, part: Callable[[str], str]) -> None:
    if name != "envoy":  # it is a Python package of the development extra
        part(name)


@pytest.mark.parametrize("name", PROXIES)
async def test_its_checker_accepts_the_configuration(name: str, part: Callable[[str], str], tmp_path: Path) -> None:
    installed(name, part)
    code, message = await check(name, tmp_path)
    assert code == 0, message


@pytest.mark.parametrize("name", PROXIES)
async def test_its_checker_would_refuse_another(name: str, part: Callable[[str], str], tmp_path: Path) -> None:
    installed(name, part)
    proxy = PROXIES[name]
    command = proxy.command(proxy.check, 50999, 50998, tmp_path)
    path = tmp_path / proxy.file_name
    path.write_text(path.read_text().replace("50999", "no-port"))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    assert await asyncio.wait_for(process.wait(), 60) != 0


def test_one_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proxies, "_PATH", str(tmp_path))
    with pytest.raises(RyzansteinError, match="nginx is not installed"):
        PROXIES["nginx"].command(PROXIES["nginx"].start, 1, 2, tmp_path)
