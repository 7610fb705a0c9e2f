"""A page whose name resolves to this machine does not reach the API: names in `Host` are checked where no key is asked for."""

from __future__ import annotations

import httpx
import pytest
from tests.router.faces.http.conftest import EchoCore, open_app

from ryzanstein.router.faces.http.serving.host_names import HostNames


async def status(host: str, path: str = "/v1/models") -> tuple[int, str]:
    app = open_app(EchoCore(), hosts=HostNames(("router.example",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get(path, headers={"Host": host})
        return answer.status_code, answer.json().get("error", {}).get("code", "")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "localhost.", "127.0.0.1:8000", "10.0.0.7", "[::1]:8000", "[::1]", "router.example:8000"],
)
async def test_names_of_the_router_and_addresses_are_let_in(host: str) -> None:
    assert await status(host) == (200, "")


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "attacker.example:8000",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "xlocalhost",
        ":8000",
    ],
)
async def test_other_names_are_refused(host: str) -> None:
    assert await status(host) == (403, "host_not_allowed")


async def test_probes_come_by_any_name() -> None:
    assert await status("attacker.example", "/healthz") == (200, "")
