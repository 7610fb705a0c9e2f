"""What an orchestrator that may be replaced does with its control plane, without a lease service."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from ryzanstein.cluster import Deployment, Node, NodeReport
from ryzanstein.errors import RyzansteinError
from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.leadership import ElectedLeadership
from ryzanstein.orchestrator.leading.campaign import Campaign
from ryzanstein.orchestrator.leading.election import Election
from ryzanstein.orchestrator.leading.lease import LeaseRecord, LeaseTimes, LeaseUnavailableError
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.state.watch import SignOfLife, Snapshot

# A term may end by itself on a machine without time to renew it: no test counts terms.
TIMES = LeaseTimes(lease_s=1.0, act_s=0.8, renew_s=0.1, poll_s=0.02, keep_s=0.4, keep_released_s=0.4)


class Memory:
    """A lease service in memory, that can be unreachable."""

    def __init__(self) -> None:
        self.record, self.reachable, self.writes = LeaseRecord(), True, 0

    async def read(self):
        if not self.reachable:
            raise LeaseUnavailableError("gone")
        return self.record

    async def replace(self, seen, wanted):
        if (await self.read()).version != seen.version:
            return None
        self.writes += 1
        self.record = LeaseRecord(str(self.writes), wanted.holder, wanted.address, wanted.epoch)
        return self.record

    async def close(self):
        """It holds nothing."""


@pytest.fixture
async def led(tmp_path, telemetry):
    """A lead whose lease is in memory, and that service."""
    settings = OrchestratorSettings(database=tmp_path / "o.sqlite")
    store, service, now = await Store.open(settings.database, telemetry), Memory(), asyncio.get_running_loop().time
    campaign = Campaign(Election("me", "me:1", now, TIMES), service, telemetry, now)
    lead = ElectedLeadership(settings, store, telemetry, campaign, now)
    task = asyncio.create_task(lead.run())
    yield lead, service, campaign
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await lead.close()
    await store.close()


async def control_of(lead):
    async with asyncio.timeout(10):
        while True:
            try:
                return lead.control
            except RyzansteinError:
                await asyncio.sleep(0.01)


async def over(control):
    async with asyncio.timeout(10):
        while not control.over:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def value(telemetry, name):
    return telemetry.registry.get_sample_value(f"ryzanstein_orchestrator_{name}")


async def test_each_term_reads_the_store_anew_and_says_so(led, telemetry):
    lead, service, _ = led
    first = await control_of(lead)
    await first.deploy(Deployment("m", "/m", 1))
    assert [value(telemetry, name) for name in ("leader", "deployments")] == [1, 1]
    assert value(telemetry, "epoch") == first.leader.epoch
    service.reachable = False
    await over(first)
    for refused in (
        lambda: lead.control,
        lambda: first.register(Node("a", "a:1", "i")),
        lambda: first.beat("a", "", NodeReport(None)),
    ):
        with pytest.raises(RyzansteinError):
            refused()
    with pytest.raises(RyzansteinError) as refusal:
        await first.deploy(Deployment("m", "/late", 1))
    assert refusal.value.reason == "NOT_LEADER"
    await asyncio.sleep(0.15)
    assert [value(telemetry, name) for name in ("leader", "deployments")] == [0, 0]
    assert value(telemetry, "lease_renewals_failed_total") >= 1
    service.reachable = True
    second = await control_of(lead)
    assert second.leader.epoch > first.leader.epoch
    assert second.deployment("m").path == "/m"


async def test_a_new_leader_lets_nodes_keep_what_they_have_for_a_while(led):
    lead, _, _ = led
    control = await control_of(lead)
    began = asyncio.get_running_loop().time()
    updates = control.updates()
    seen = await anext(updates)
    while isinstance(seen, SignOfLife):
        seen = await anext(updates)
    assert isinstance(seen, Snapshot)
    assert asyncio.get_running_loop().time() - began > 0.25
    assert isinstance(await anext(updates), SignOfLife), "nothing changes, and it lives"
    await updates.aclose()


async def test_a_leader_that_a_peer_or_the_store_knows_to_be_stale_steps_down_and_comes_back_above(led):
    lead, service, _ = led
    control = await control_of(lead)
    with pytest.raises(RyzansteinError) as refused:
        await control.met(LeaderEpoch(40, "other"))
    assert refused.value.reason == "STALE_LEADER"
    await over(control)
    control = await control_of(lead)
    assert control.leader.epoch >= 41
    lead.fenced(60)
    assert control.over
    control = await control_of(lead)
    assert service.record.epoch >= control.leader.epoch >= 61
    with pytest.raises(RyzansteinError) as refused:
        await control.met(LeaderEpoch(2**40, "nonsense"))
    assert refused.value.reason == "INVALID_ARGUMENT"
    assert not control.over


async def test_a_leader_that_cannot_read_the_store_lets_another_one_try(led, monkeypatch):
    lead, service, _ = led
    control = await control_of(lead)

    async def broken():
        raise RyzansteinError("no disk")

    monkeypatch.setattr(lead._store, "deployments", broken)
    service.record = LeaseRecord("other", "", "", control.leader.epoch)
    await over(control)
    async with asyncio.timeout(10):
        while service.record.epoch < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    monkeypatch.undo()
    assert (await control_of(lead)).leader.epoch >= 3


async def test_who_stops_gives_the_lease_back(tmp_path, telemetry):
    settings, now = OrchestratorSettings(database=tmp_path / "p.sqlite"), asyncio.get_running_loop().time
    store, service = await Store.open(settings.database, telemetry), Memory()
    lead = ElectedLeadership(
        settings, store, telemetry, Campaign(Election("me", "me:1", now, TIMES), service, telemetry, now), now
    )
    task = asyncio.create_task(lead.run())
    await control_of(lead)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await lead.close()
    assert service.record.holder == ""
    assert service.record.epoch >= 1
    await store.close()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"leader_election": "redis", "advertise_address": "a:1"}, "requires store redis"),
        ({"leader_election": "kubernetes", "store": "redis", "redis_url": "redis://r"}, "requires advertise_address"),
        ({"store": "redis"}, "requires redis_url"),
        ({"store": "redis", "redis_url": "http://r"}, "must be redis://"),
        ({"kubernetes_lease": "No Such/Name"}, "kubernetes_lease"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, settings, fault):
    with pytest.raises(ValidationError, match=fault):
        OrchestratorSettings(database=tmp_path / "o", **settings)
