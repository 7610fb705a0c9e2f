"""Embeddings through a router: OpenAI's client, gRPC, a node that dies, and what is refused by name."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from openai import BadRequestError, OpenAI

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.service_process import ServiceProcess
from ryzanstein.v1 import embedding_pb2 as pb
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.embedding_pb2_grpc import EmbeddingServiceStub
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = pytest.mark.long

TEXTS = [f"{i} is a number, and so is {i + 1}" for i in range(70)]


@pytest.fixture(scope="module")
def cluster(embedding_dir: Any) -> Iterator[LocalCluster]:
    flags = ("--dtype", "float32")
    model = embedding_dir(matryoshka_dimensions=[16])
    with LocalCluster(ClusterSpec(model, num_nodes=2, tp=1, worker_flags=flags)) as cluster:
        yield cluster


@pytest.fixture
def openai(cluster: LocalCluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0)


def test_openais_client_gets_the_same_vectors_in_both_encodings_and_over_grpc(cluster: LocalCluster, openai: OpenAI) -> None:
    packed = openai.embeddings.create(model="embedder", input=TEXTS)  # the client asks for base64
    plain = openai.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    with grpc.insecure_channel(cluster.router_address) as channel:
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(text=text) for text in TEXTS])
        over_grpc = EmbeddingServiceStub(channel).Embed(request, timeout=60)
    assert over_grpc.model == packed.model == "embedder"
    assert [each.index for each in packed.data] == list(range(len(TEXTS)))
    vectors = [list(each.values) for each in over_grpc.embeddings]
    assert [each.embedding for each in plain.data] == [each.embedding for each in packed.data] == vectors
    assert packed.usage.total_tokens == packed.usage.prompt_tokens == sum(each.prompt_tokens for each in over_grpc.embeddings)
    assert len(openai.embeddings.create(model="embedder", input="a", dimensions=16).data[0].embedding) == 16


def test_what_an_embedding_model_cannot_do_is_refused(cluster: LocalCluster, openai: OpenAI) -> None:
    def refused(path: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{cluster.http_url}{path}", json=body, timeout=30)
        assert answer.status_code == 400, answer.text
        return dict(answer.json()["error"])

    with pytest.raises(BadRequestError) as wrong:
        openai.completions.create(model="embedder", prompt="1 2 3")
    assert wrong.value.code == "embeddings_only"
    for body, param in (
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "none"}, "prompt_name"),
    ):
        assert refused("/v1/embeddings", **body)["param"] == param
    for texts in (["12 " * 1000], ["a"] * 70 + ["12 " * 1000] + ["a"] * 9):
        too_long = refused("/v1/embeddings", input=texts)
        assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", f"input[{len(texts) // 80 * 70}]")


@pytest.fixture
def both(cluster: LocalCluster) -> ServiceProcess:
    """The second node, while both are ready."""
    node = cluster.services["node-1"]
    if not node.running:
        node.start()
    deadline = time.monotonic() + 60
    with grpc.insecure_channel(cluster.router_address) as channel:
        stub = InferenceServiceStub(channel)
        while stub.ListModels(inference.ListModelsRequest(), timeout=5).models[0].ready_nodes < 2:
            assert time.monotonic() < deadline, "the second node is not ready"
            time.sleep(0.05)
    return node


def _retries(cluster: LocalCluster) -> float:
    lines = httpx.get(f"{cluster.http_url}/metrics").text.splitlines()
    retried = [line for line in lines if line.startswith("ryzanstein_router_embedding_retries_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in retried)


def _eight(openai: OpenAI, texts: list[str], strike: Callable[[], object]) -> list[list[list[float]]]:
    """Returns the vectors of eight equal requests at once, in the middle of which something happens."""
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(openai.embeddings.create, model="embedder", input=texts) for _ in range(8)]
        time.sleep(0.3)
        assert not all(each.done() for each in asked), "the requests are over before anything happens"
        pool.submit(strike).result(60)
        return [[entry.embedding for entry in each.result(90).data] for each in asked]


def test_requests_of_more_inputs_than_a_node_lets_wait_are_answered(openai: OpenAI, both: ServiceProcess) -> None:
    texts = [f"{i} " * 20 for i in range(400)]
    expected = [each.embedding for each in openai.embeddings.create(model="embedder", input=texts).data]
    assert all(answer == expected for answer in _eight(openai, texts, both.kill))


def test_eight_equal_requests_outlive_a_node_that_freezes(cluster: LocalCluster, openai: OpenAI, both: ServiceProcess) -> None:
    texts = [f"{i} " * 150 for i in range(160)]
    expected = [each.embedding for each in openai.embeddings.create(model="embedder", input=texts).data]
    before = _retries(cluster)
    try:
        answers = _eight(openai, texts, lambda: both.signal(signal.SIGSTOP))
    finally:
        both.signal(signal.SIGCONT)
    assert all(answer == expected for answer in answers)
    assert _retries(cluster) > before


def test_eight_equal_requests_outlive_a_drained_node(cluster: LocalCluster, openai: OpenAI, both: ServiceProcess) -> None:
    texts = [f"{i} " * 150 for i in range(160)]
    expected = [each.embedding for each in openai.embeddings.create(model="embedder", input=texts).data]
    with grpc.insecure_channel(both.grpc_address) as channel:
        stub = WorkerServiceStub(channel)
        answers = _eight(openai, texts, lambda: stub.Drain(worker.DrainRequest(grace=Duration(seconds=20)), timeout=60))
        stub.Undrain(worker.UndrainRequest(), timeout=10)
    assert all(answer == expected for answer in answers)


def test_a_request_outlives_a_node_that_dies(cluster: LocalCluster, openai: OpenAI, both: ServiceProcess) -> None:
    texts = [f"{i} " * 150 for i in range(600)]
    expected = openai.embeddings.create(model="embedder", input=texts)
    killer = threading.Timer(0.4, both.kill)
    killer.start()
    answers = [openai.embeddings.create(model="embedder", input=texts) for _ in range(2)]
    killer.join()
    for answer in answers:
        assert [each.embedding for each in answer.data] == [each.embedding for each in expected.data]
    assert _retries(cluster) >= 1
