"""Clients that ping, at every service of a real cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ryzanstein.rpc.server import CLIENTS_PING_S

pytestmark = [pytest.mark.cluster, pytest.mark.long]
# gRPC throws a client out at its third early ping.
PINGS = 4


@pytest.mark.lab
async def test_no_service_throws_out_a_client_that_pings_as_documented(calm: Any, pinger: Any) -> None:
    async def expelled(name: str, address: str, stream: bool) -> list[str]:
        async with pinger(address) as client:
            if stream:
                client.watch_health()
            verdicts = []
            for _ in range(PINGS):
                verdicts.append(await client.ping())
                # Nearly as often as is permitted: a client's ping may be late, and the next on time.
                await asyncio.sleep(0.6 * CLIENTS_PING_S)
        return [f"{name}, {'idle stream' if stream else 'without calls'}: {verdict}" for verdict in verdicts if verdict]

    services = {name: service.grpc_address for name, service in calm.cluster.services.items()}
    assert {name.split("-")[0] for name in services} == {"orchestrator", "node", "router"}
    refusals = await asyncio.gather(*(expelled(*item, stream) for item in services.items() for stream in (False, True)))
    assert not any(refusals), refusals
