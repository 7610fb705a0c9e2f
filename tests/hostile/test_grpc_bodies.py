"""Every method of every service answers what is no request with a typed status, and its process goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from tests.hostile.grpc_calls import BROKEN, all_outcomes, outcome
from tests.hostile.grpc_corpus import FILES, methods, named, random_messages
from tests.hostile.vitals import bad_lines, vitals

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import worker_pb2 as worker

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.long]

RANDOM_PER_METHOD = 500
SEED = 13
NAMES = {"router": "router-0", "orchestrator": "orchestrator", "worker": "node-0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1)) as cluster:
        yield cluster


def check_unharmed(cluster: LocalCluster, pids: dict[str, int]) -> None:
    assert {name: vital.pid for name, vital in vitals(cluster).items()} == pids
    for name, service in cluster.services.items():
        assert bad_lines(service.log_path) == [], name


@pytest.mark.parametrize("service", FILES)
async def test_each_named_message_is_refused_by_a_typed_status(service: str, cluster: LocalCluster) -> None:
    pids = {name: vital.pid for name, vital in vitals(cluster).items()}
    address = cluster.services[NAMES[service]].grpc_address
    for method in methods(service):
        calls = named(method)
        for name, (_, _, code) in zip(
            calls, await all_outcomes(address, ((method, data) for data in calls.values()), 4), strict=True
        ):
            assert code not in BROKEN, (method.path, name, code)
            if name == "over_the_bound":
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, (method.path, name)
            elif name in ("millions_of_numbers", "deep_groups", "endless_varint", "length_beyond_the_end"):
                assert code is grpc.StatusCode.INVALID_ARGUMENT, (method.path, name)
    check_unharmed(cluster, pids)


@pytest.mark.parametrize("service", FILES)
async def test_random_messages_are_answered_by_typed_statuses(service: str, cluster: LocalCluster) -> None:
    pids = {name: vital.pid for name, vital in vitals(cluster).items()}
    address = cluster.services[NAMES[service]].grpc_address
    for method in methods(service):
        calls = [(method, data) for data in random_messages(method, RANDOM_PER_METHOD, SEED)]
        outcomes = await all_outcomes(address, calls)
        broken = [(data.hex(), code) for _, data, code in outcomes if code in BROKEN]
        assert broken == [], (method.path, Counter(code for _, _, code in outcomes))
    check_unharmed(cluster, pids)


async def test_a_torn_frame_ends_its_stream_and_the_node_links_again(cluster: LocalCluster) -> None:
    """A router that goes mad in the middle of its stream."""
    (connect,) = (method for method in methods("worker") if method.path.endswith("/Connect"))
    hello = worker.ConnectRequest(hello=worker.RouterHello(router_id="mad")).SerializeToString()
    async with grpc.aio.insecure_channel(cluster.services["node-0"].grpc_address) as channel:
        call = channel.stream_stream(connect.path)(iter((hello, b"\x12\x05ab")), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await outcome(channel, connect, hello) is grpc.StatusCode.OK
    check_unharmed(cluster, {name: vital.pid for name, vital in vitals(cluster).items()})
