"""Clusters whose nodes compute on GPUs, with our own engine and beside vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.gpu.conftest import DEMO, need

from ryzanstein.cli.node_devices import NodeDevices
from ryzanstein.cli.processes.cluster import OWN_RANKS, ClusterSpec, LocalCluster
from ryzanstein.process.gpus import find_gpus
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

pytestmark = pytest.mark.gpu

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_p": 0.95, "presence_penalty": 0.5, "min_tokens": 8}


def answer_of(cluster: LocalCluster, kill_at: int = -1, **sampling: Any) -> tuple[list[int], list[str]]:
    """The tokens of an answer and the nodes that gave them; the first node is killed at an index."""
    params = inference.SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **sampling})
    request = inference.StreamCompleteRequest(complete=inference.CompleteRequest(text="one two three", sampling=params))
    tokens: list[int] = []
    nodes: list[str] = []
    with grpc.insecure_channel(cluster.router_address) as channel:
        for response in inference_grpc.InferenceServiceStub(channel).StreamComplete(request, timeout=120):
            if response.event.WhichOneof("kind") != "delta":
                continue
            delta = response.event.delta
            assert delta.first_index == len(tokens)
            tokens += delta.token_ids
            nodes += [] if delta.node_id in nodes else [delta.node_id]
            if 0 <= kill_at < len(tokens) and len(nodes) == 1:
                cluster.kill(delta.node_id)
    return tokens, nodes


def on_cpu(model: Path, **sampling: Any) -> list[int]:
    with LocalCluster(ClusterSpec(model, num_nodes=1, tp=1)) as cluster:
        return answer_of(cluster, **sampling)[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_our_engine_computes_as_on_a_cpu(tp: int) -> None:
    """In float32. With two ranks the all-reduce is NCCL's."""
    need(tp)
    devices = NodeDevices.chosen("cuda", 1, tp, find_gpus())
    spec = ClusterSpec(DEMO, num_nodes=1, tp=tp, devices=devices, rank_flags=("--dtype", "float32"))
    with LocalCluster(spec) as cluster:
        greedy, sampled = answer_of(cluster)[0], answer_of(cluster, **SAMPLED)[0]
    assert greedy == on_cpu(DEMO)
    assert sampled == on_cpu(DEMO, **SAMPLED)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_node_in_reserve_continues_what_vllm_began(vllm: str, small_model: Path, sampling: dict[str, Any]) -> None:
    spec = ClusterSpec(small_model, num_nodes=2, tp=1, engines=(vllm, OWN_RANKS))
    with LocalCluster(spec) as cluster:
        whole, nodes = answer_of(cluster, **sampling)
        assert nodes == ["node-0"], "the node in reserve has nothing to do"
        tokens, nodes = answer_of(cluster, kill_at=9, **sampling)
    assert nodes == ["node-0", "node-1"]
    assert tokens == whole
