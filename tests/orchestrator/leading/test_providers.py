"""The lease in a real Redis, and in a small API server: both compare and set."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
from tests.orchestrator.leading.api_server import FakeApiServer
from tests.public_certificates import PublicAuthority, pem

from ryzanstein.orchestrator.leading.campaign import Campaign
from ryzanstein.orchestrator.leading.election import Election
from ryzanstein.orchestrator.leading.lease import LeaseProvider, LeaseRecord, LeaseTimes, LeaseUnavailableError
from ryzanstein.orchestrator.leading.providers.kubernetes_lease import ApiServer, KubernetesLease
from ryzanstein.orchestrator.leading.providers.redis_lease import RedisLease
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.storage.redis_client import redis_client


@pytest.fixture
def api():
    server = FakeApiServer()
    yield server
    server.close()


def kubernetes(api, folder) -> KubernetesLease:
    return KubernetesLease(ApiServer(api.url, folder), "ns", "orchestrator", 5.0, 1.0)


@pytest.fixture(params=["redis", "kubernetes"])
async def providers(request, tmp_path, start_redis, api) -> AsyncIterator[list[LeaseProvider]]:
    """Three providers of one lease."""
    if request.param == "redis":
        server = await start_redis()
        made: list[LeaseProvider] = [RedisLease(redis_client(server.url), "t:") for _ in range(3)]
    else:
        made = [kubernetes(api, tmp_path) for _ in range(3)]
    yield made
    for each in made:
        await each.close()


async def test_a_record_is_replaced_by_who_saw_the_last_one(providers):
    first, second, _ = providers
    nothing = await first.read()
    assert nothing == LeaseRecord()
    held = await first.replace(nothing, LeaseRecord("", "a", "a:1", 2**40))
    assert await second.read() == held
    assert (held.holder, held.address, held.epoch) == ("a", "a:1", 2**40)
    assert await second.replace(nothing, LeaseRecord("", "b", "b:1", 9)) is None
    renewed = await first.replace(held, held)
    assert renewed.version != held.version, "what is the same is a change, too"
    assert await second.replace(held, LeaseRecord("", "b", "b:1", 9)) is None
    released = await first.replace(renewed, LeaseRecord("", "", "", 2**40))
    assert await second.read() == released


async def test_of_many_who_want_it_one_gets_it(providers):
    for _ in range(5):
        seen = await providers[0].read()
        wanted = [each.replace(seen, LeaseRecord("", str(n), "x:1", 1)) for n, each in enumerate(providers)]
        won = [each for each in await asyncio.gather(*wanted) if each is not None]
        assert won == [await providers[0].read()]


async def test_one_of_three_leads_and_another_follows_when_it_ends(providers):
    times = LeaseTimes(lease_s=1.0, act_s=0.8, renew_s=0.1, poll_s=0.05)
    loop = asyncio.get_running_loop()
    campaigns, tasks = [], []
    for name, provider in zip("abc", providers, strict=True):
        campaign = Campaign(Election(name, f"{name}:1", loop.time, times), provider, OrchestratorTelemetry(), loop.time)
        campaigns.append(campaign)
        tasks.append(asyncio.create_task(campaign.run()))
    seen = []
    for ends in ("killed", "released", ""):
        async with asyncio.timeout(20):
            while not (leading := [each for each in campaigns if each.election.tenure is not None]):
                await campaigns[0].changed(0.02)
        (leader,) = leading
        seen.append(leader.election.tenure.leader)
        index = campaigns.index(leader)
        tasks[index].cancel()
        if ends == "released":
            await leader.close()
        elif ends == "killed":
            leader.election.resign()
    epochs = [each.epoch for each in seen]
    assert epochs == sorted(set(epochs)), "one after the other, if also not without a break on a slow machine"
    assert len({each.leader_id for each in seen}) == 3
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_redis_that_is_gone_is_unavailable(start_redis):
    server = await start_redis()
    lease = RedisLease(redis_client(server.url), "t:")
    await server.kill()
    with pytest.raises(LeaseUnavailableError):
        await lease.read()
    with pytest.raises(LeaseUnavailableError):
        await lease.replace(LeaseRecord(), LeaseRecord())
    await lease.close()


async def test_an_api_server_that_refuses_or_answers_nonsense_is_unavailable(api, tmp_path):
    lease = kubernetes(api, tmp_path)
    for status in (401, 403, 500, 503):
        api.status = status
        with pytest.raises(LeaseUnavailableError, match=str(status)):
            await lease.read()
    api.status = 200
    with pytest.raises(LeaseUnavailableError, match="not a Lease"):
        await lease.read()


async def test_the_token_is_read_for_each_call(api, tmp_path):
    lease = kubernetes(api, tmp_path)
    for token in ("one", "two"):
        (tmp_path / "token").write_text(token + "\n")
        await lease.read()
    assert api.tokens == ["Bearer one", "Bearer two"]


async def test_a_lease_that_people_made_has_no_epoch(api, tmp_path):
    api.leases["orchestrator"] = {"metadata": {"name": "orchestrator", "resourceVersion": "5"}, "spec": {}}
    assert await kubernetes(api, tmp_path).read() == LeaseRecord("5", "", "", 0)


async def test_the_api_server_is_trusted_by_the_ca_of_the_service_account_alone(tmp_path):
    authority, account = PublicAuthority(), tmp_path / "account"
    account.mkdir()
    files = authority.write(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = FakeApiServer(context)
    try:
        lease = kubernetes(server, account)
        (account / "ca.crt").write_bytes(pem(PublicAuthority().certificate))
        with pytest.raises(LeaseUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await lease.read()
        (account / "ca.crt").write_bytes(pem(authority.certificate))
        held = await lease.replace(await lease.read(), LeaseRecord("", "a", "a:1", 3))
        assert await lease.read() == held
    finally:
        server.close()


async def test_an_api_server_that_does_not_answer_is_unavailable_after_the_timeout(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = ApiServer(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        with pytest.raises(LeaseUnavailableError, match=r"[Tt]ime"):
            await KubernetesLease(server, "ns", "orchestrator", 5.0, 0.2).read()
