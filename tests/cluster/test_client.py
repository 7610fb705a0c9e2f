"""The Python client on clusters of real processes: the routers that it learns, with a private CA and a key too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.public_certificates import PublicAuthority, pem

from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.cli.access.router_trust import RouterTls
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.client import Answer, AsyncClient, Client, Text, Tls
from ryzanstein.client import errors as raised
from ryzanstein.demo import MODEL_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(300)]

QUESTION: dict[str, Any] = {"messages": "Count from 1 to 90.", "temperature": 0, "max_tokens": 800, "ignore_eos": True}
"""So long that a router dies in the middle of the answer, not when all of it is on its way to the client."""
LEARNED_S = 30.0


def wait_until_learned(client: Client | AsyncClient, number: int) -> None:
    deadline = time.monotonic() + LEARNED_S
    while len(client._core.routers.learned) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Beginning:
    """The first text behind the fifth token: texts that come together are one event."""

    passed = False

    def begins(self, event: object) -> bool:
        before, self.passed = self.passed, self.passed or (isinstance(event, Text) and event.first_index >= 5)
        return self.passed and not before


def follow_a_death(cluster: LocalCluster, router: str, kind: str, *, others: int, **settings: Any) -> Answer:
    """Returns the answer of a client that is given one router, which dies when so many others are known."""
    address, begun = cluster.services[router].grpc_address, Beginning()
    if kind == "sync":
        with Client(address, **settings) as client:
            client.models()
            wait_until_learned(client, others)
            with client.stream(**QUESTION) as stream:
                for event in stream:
                    if begun.begins(event):
                        cluster.kill(router)
            return stream.answer

    async def ask() -> Answer:
        async with AsyncClient(address, **settings) as client:
            await client.models()
            await asyncio.to_thread(wait_until_learned, client, others)
            async with client.stream(**QUESTION) as stream:
                async for event in stream:
                    if begun.begins(event):
                        await asyncio.to_thread(cluster.kill, router)
            return stream.answer

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, num_routers=3)) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster) -> Answer:
    with Client(cluster.router_addresses) as client:
        return client.chat(**QUESTION)


@pytest.mark.parametrize(("kind", "router"), [("sync", "router-0"), ("async", "router-1")])
def test_a_client_of_one_router_goes_on_at_another_that_it_learned(
    cluster: LocalCluster, undisturbed: Answer, kind: str, router: str
) -> None:
    answer = follow_a_death(cluster, router, kind, others=2)
    cluster.restart(router)
    assert answer.reattaches >= 1
    assert (answer.token_ids, answer.text, answer.finish_reason) == (undisturbed.token_ids, undisturbed.text, "length")


def test_a_client_that_learns_nothing_waits_for_its_router(cluster: LocalCluster, undisturbed: Answer) -> None:
    with pytest.raises(raised.RouterUnreachable) as failed:
        follow_a_death(cluster, "router-2", "sync", others=0, learn_routers=False, patience_s=1.0)
    cluster.restart("router-2")
    assert failed.value.partial is not None
    come = failed.value.partial.token_ids
    assert 5 < len(come) < len(undisturbed.token_ids)
    assert come == undisturbed.token_ids[: len(come)]


def test_a_private_ca_and_a_key_hold_at_the_router_that_was_learned(tmp_path: Path) -> None:
    """Nothing is sent in the clear, nor to somebody whose certificate is of another CA."""
    files, stranger = PublicAuthority().write(tmp_path), PublicAuthority()
    key, keys = ApiKey.new(), tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text("[tenant.acme]\n" + key_text(KeyRecord(key.key_id, key.digest(), "acme", DEFAULT_SCOPES)))
    spec = ClusterSpec(
        MODEL_DIR,
        num_nodes=1,
        tp=1,
        num_routers=2,
        router_flags=("--keys-file", str(keys)),
        api_key=key.reveal(),
        router_tls=RouterTls.given(files.certificate, files.key, files.ca),
    )
    with LocalCluster(spec) as cluster:
        trusting = Tls(files.ca.read_bytes())
        for tls in (None, Tls(pem(stranger.certificate))):
            client = Client(cluster.router_address, key=key.reveal(), tls=tls, patience_s=1.0)
            with closing(client), pytest.raises(raised.RouterUnreachable):
                client.chat("Count from 1 to 3.")
        with Client(cluster.router_address, tls=trusting) as client, pytest.raises(raised.KeyRefused):
            client.chat("Count from 1 to 3.")
        settings: Any = {"key": key.reveal(), "tls": trusting}
        with Client(cluster.router_address, **settings) as client:
            client.models()
            wait_until_learned(client, 1)
            cluster.kill("router-0")
            assert client.chat("Count from 1 to 9.", temperature=0).text == "1 2 3 4 5 6 7 8 9"
            assert client._core.routers.learned == (cluster.router_addresses[1],)
