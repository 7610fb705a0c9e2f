"""Routers that share one certificate and so one id, as those do whose certificate is in one Secret."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    authority = Authority.new(DEFAULT_TRUST)
    authority.save(tmp_path / "state" / "tls")
    authority.write(Peer(PeerRole.ROUTER, "routers"), tmp_path / "shared")
    shared = {"router_id": "routers", "tls_dir": str(tmp_path / "shared")}
    spec = ClusterSpec(
        MODEL_DIR,
        num_nodes=1,
        num_routers=2,
        tp=1,
        secure=True,
        state_dir=tmp_path / "state",
        settings={"router-0": shared, "router-1": shared},
    )
    with LocalCluster(spec) as started:
        yield started


def test_each_links_the_node_and_the_one_reads_at_the_other_what_its_client_began(cluster: LocalCluster) -> None:
    """They share their sessions, so they ask each other, over TLS, as `routers`."""
    first, second = (grpc.insecure_channel(each, (("grpc.use_local_subchannel_pool", 1),)) for each in cluster.router_addresses)
    with first, second:
        message = inference.Message(role=inference.ROLE_USER, content="Count from 1 to 9.")
        sampling = inference.SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
        request = inference.StreamChatRequest(chat=inference.ChatRequest(messages=[message], sampling=sampling))
        stream = InferenceServiceStub(first).StreamChat(request, timeout=60)
        generation_id = next(iter(stream)).event.started.generation_id
        time.sleep(0.5)
        stream.cancel()
        attach = inference.AttachGenerationRequest(generation_id=generation_id)
        read = list(InferenceServiceStub(second).AttachGeneration(attach, timeout=60))
    assert read[-1].event.finished.usage.completion_tokens == 1500
    logs = [json.loads(line) for line in (cluster.state_dir / "node-0.log").read_text().splitlines() if line.startswith("{")]
    assert [each["router_id"] for each in logs if each["event"] == "router connected"] == ["routers"] * 2
