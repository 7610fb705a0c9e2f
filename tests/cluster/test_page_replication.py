"""A node dies in the middle of an answer: its backup continues from its pages and computes almost nothing."""

from __future__ import annotations

import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

pytestmark = [pytest.mark.cluster, pytest.mark.long]

LONG = " ".join(f"Item {i} is number {7 * i}." for i in range(60))


def metric(harness: Any, node_id: str, name: str, **labels: str) -> float:
    """A metric of a node's model, 0 where it is absent."""
    with urllib.request.urlopen(harness.cluster.services[node_id].metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    inside = ",".join(f'{key}="{value}"' for key, value in sorted({**labels, "model": "demo"}.items()))
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{{inside}}} ")), 0.0)


def prefilled(harness: Any, node_id: str) -> float:
    return metric(harness, node_id, "ryzanstein_worker_tokens_total", kind="prefill")


def test_the_backup_continues_from_pages_and_computes_almost_nothing(stormy: Any) -> None:
    assert_continues_almost_at_once(stormy, num_nodes=3)


def test_a_node_dials_no_address_but_those_of_nodes(stormy: Any, holds: Any) -> None:
    """Whoever may submit to a node names a place of which the node fetches pages, and one to which it sends them."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        listening = f"127.0.0.1:{stranger.getsockname()[1]}"
        before = {cause: metric(stormy, "node-0", REFUSED, cause=cause) for cause in ("address", "not_member")}
        for i, address in enumerate((listening, stormy.cluster.router_address, "169.254.169.254:80", "unix:/tmp/x")):
            submit_to(stormy.cluster.services["node-0"].grpc_address, address, i)
        for cause, num in before.items():
            assert holds(lambda cause=cause, num=num: metric(stormy, "node-0", REFUSED, cause=cause) >= num + 2, 20)
        with pytest.raises(BlockingIOError):
            stranger.accept()


REFUSED = "ryzanstein_worker_page_addresses_refused_total"


def submit_to(node: str, address: str, number: int) -> None:
    """Has a node answer a prompt, as its router, with this address as that of two other nodes."""
    place = worker.NodePlace(node_id="stranger", address=address)
    text = inference.Message(role=inference.ROLE_USER, content=f"{number}: {LONG}")
    submit = worker.Submit(
        handle=1,
        generation_id=f"g-{number}",
        messages=inference.Messages(messages=[text]),
        sampling=inference.SamplingParams(seed=1, max_tokens=2),
        backup=place,
        previous=place,
        conversation_key=bytes([number]) * 16,
    )
    ended = threading.Event()

    def frames() -> Iterator[worker.ConnectRequest]:
        yield worker.ConnectRequest(hello=worker.RouterHello(router_id=f"stranger-{number}"))
        yield worker.ConnectRequest(submit=submit)
        ended.wait(30)

    with grpc.insecure_channel(node) as channel:
        answers = worker_grpc.WorkerServiceStub(channel).Connect(frames(), timeout=30)
        assert any(answer.HasField("output") and answer.output.finished for answer in answers)
        ended.set()
        answers.cancel()


def test_compressed_pages_are_replicated_too(compressed: Any) -> None:
    assert_continues_almost_at_once(compressed, num_nodes=2)


def assert_continues_almost_at_once(harness: Any, num_nodes: int) -> None:
    """Kills the node that answers. The answer is as without a fault, and its prompt is not computed again."""
    calm = harness.client.chat(LONG, session_id="calm", max_tokens=200, seed=5, temperature=0.7, ignore_eos=True)
    before: dict[str, float] = {}
    killed: list[str] = []

    def kill_late(delta: Any) -> None:
        if delta.first_index < 100 or killed:
            return
        killed.append(delta.node_id)
        harness.cluster.kill(delta.node_id, signal.SIGSTOP)  # so that it is not yet at the end when it is killed
        for node_id in harness.cluster.node_ids:
            if node_id != delta.node_id:
                before[node_id] = prefilled(harness, node_id)
        harness.cluster.kill(delta.node_id, signal.SIGKILL)

    answer = harness.client.chat(
        LONG, session_id="calm-2", on_delta=kill_late, max_tokens=200, seed=5, temperature=0.7, ignore_eos=True
    )
    assert answer.token_ids == calm.token_ids
    assert len(answer.nodes) == 2
    first, backup = answer.nodes
    assert killed == [first]
    assert answer.prompt_tokens > 500
    assert prefilled(harness, backup) - before[backup] < 64, "what was computed again"
    harness.start_again(first)
    harness.wait_at_least(num_nodes)
