"""Embeddings through a router: OpenAI's client, gRPC, a node that dies, and what is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from openai import BadRequestError, OpenAI

from ryzanstein.cli.processes import ClusterSpec, LocalCluster
from ryzanstein.v1 import embedding_pb2 as pb
from ryzanstein.v1.embedding_pb2_grpc import EmbeddingServiceStub

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
    assert refused("/v1/embeddings", input="12 " * 1000)["code"] == "context_length_exceeded"


def test_a_request_outlives_a_node_that_dies(cluster: LocalCluster, openai: OpenAI) -> None:
    texts = [f"{i} " * 150 for i in range(600)]
    expected = openai.embeddings.create(model="embedder", input=texts)
    killer = threading.Timer(0.4, cluster.services["node-1"].kill)
    killer.start()
    answers = [openai.embeddings.create(model="embedder", input=texts) for _ in range(2)]
    killer.join()
    for answer in answers:
        assert [each.embedding for each in answer.data] == [each.embedding for each in expected.data]
    metrics = httpx.get(f"{cluster.http_url}/metrics").text
    retried = [line for line in metrics.splitlines() if line.startswith("ryzanstein_router_embedding_retries_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in retried) >= 1
