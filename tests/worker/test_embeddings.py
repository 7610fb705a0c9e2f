"""Vectors of a node with real ranks, judged by transformers: in any company, cut, normalized, refused, cancelled."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import embedding_pb2 as pb
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.embedding_pb2_grpc import EmbeddingServiceStub

TEXTS = ["My name is Tavik.", "Count from 1 to 20.", "a", "1 2 3 4 5 6 7 8 9 10 " * 24]


class Judge:
    """transformers' own model with the pooling written out."""

    def __init__(self, folder: Path, pooling: str, *, normalize: bool) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import Qwen3Model

        self._torch, self._pooling, self._normalize = torch, pooling, normalize
        self._model = Qwen3Model.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def vector(self, text: str, dimensions: int | None = None) -> Any:
        return self.of_tokens(self.tokenizer.encode(text.strip()).ids, dimensions)

    def of_tokens(self, token_ids: list[int], dimensions: int | None = None) -> Any:
        with self._torch.inference_mode():
            hidden = self._model(self._torch.tensor([token_ids])).last_hidden_state[0]
        pooled = (hidden[-1] if self._pooling == "lasttoken" else hidden.mean(dim=0))[:dimensions]
        return self._torch.nn.functional.normalize(pooled, dim=0) if self._normalize else pooled


def texts(*given: str, **more: Any) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.EmbedInput(text=text) for text in given], **more)


def worst(answer: pb.EmbedResponse, expected: list[Any]) -> float:
    import torch

    pairs = zip(answer.embeddings, expected, strict=True)
    return max(float((torch.tensor(list(found.values)) - wanted).abs().max()) for found, wanted in pairs)


async def refused(stub: Any, request: pb.EmbedRequest, **more: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Embed(request, **more)
    return error_from_rpc(failure.value)


@pytest.mark.parametrize(("pooling", "normalize", "tp"), [("lasttoken", True, 2), ("mean", False, 1)])
@pytest.mark.long
async def test_vectors_are_those_of_transformers_in_any_company(
    embedding_dir: Any, start_node: Any, pooling: str, normalize: bool, tp: int
) -> None:
    folder = embedding_dir(pooling=pooling, normalize=normalize)
    node = start_node("--dtype", "float32", "--max-tokens-per-step", "64", model=folder, tp=tp)
    node.wait_event("ranks ready")
    judge = Judge(folder, pooling, normalize=normalize)
    async with open_channel(node.address) as channel:
        stub = EmbeddingServiceStub(channel)
        together = await stub.Embed(texts(*TEXTS))
        assert worst(together, [judge.vector(text) for text in TEXTS]) < 1e-5
        alone = [await stub.Embed(texts(text)) for text in TEXTS]
        crowd = await asyncio.gather(*(stub.Embed(texts(*TEXTS[i:], *TEXTS[:i])) for i in range(4) for _ in range(3)))
        vectors = [list(each.values) for each in together.embeddings]
        assert [list(each.embeddings[0].values) for each in alone] == vectors, "the same bits alone, and from the prefix cache"
        for i, answer in enumerate(crowd):
            begin = i // 3
            assert [list(each.values) for each in answer.embeddings] == vectors[begin:] + vectors[:begin]
        ids = judge.tokenizer.encode(TEXTS[1]).ids
        given = await stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=inference.TokenIds(ids=ids))]))
        assert list(given.embeddings[0].values) == vectors[1]
        assert given.embeddings[0].prompt_tokens == len(ids)
        prompted = await stub.Embed(texts(TEXTS[0], prompt_name="query"))
        assert worst(prompted, [judge.vector("Find: " + TEXTS[0])]) < 1e-5


@pytest.fixture
async def cut_node(embedding_dir: Any, start_node: Any) -> Any:
    node = start_node("--dtype", "float32", model=embedding_dir(matryoshka_dimensions=[16, 32]), tp=1)
    node.wait_event("ranks ready")
    async with open_channel(node.address) as channel:
        yield node, EmbeddingServiceStub(channel)


async def test_vectors_are_cut_where_the_model_says_so_and_what_it_cannot_do_is_refused(
    cut_node: Any, connect: Any, attempt: Any
) -> None:
    node, stub = cut_node
    short = (await stub.Embed(texts(TEXTS[0], dimensions=16))).embeddings[0].values
    whole = (await stub.Embed(texts(TEXTS[0]))).embeddings[0].values
    length = sum(number * number for number in whole[:16]) ** 0.5
    assert list(short) == pytest.approx([number / length for number in whole[:16]], abs=1e-6)
    for request, field in (
        (texts(TEXTS[0], dimensions=17), "dimensions"),
        (texts(TEXTS[0], dimensions=0), "dimensions"),
        (texts(TEXTS[0], prompt_name="passage"), "prompt_name"),
        (texts(), "inputs"),
        (texts(TEXTS[0], priority=11), "priority"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "inputs[0]"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=inference.TokenIds(ids=[10**6]))]), "inputs[0]"),
    ):
        error = await refused(stub, request)
        assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, field), error
    too_long = await refused(stub, texts(TEXTS[0], "12 " * 1000))
    assert (too_long.reason, too_long.metadata["context_length"]) == ("CONTEXT_TOO_LONG", "768")
    assert too_long.violations[0].field == "inputs[1]"
    late = await refused(stub, texts(*(f"{i} " * 300 for i in range(500))), timeout=0.2)
    assert late.code is Code.DEADLINE_EXCEEDED
    async with connect(node.address) as link:
        asked = attempt(prompt=TextPrompt("1 2 3"), max_tokens=2)
        stream = await link.run(replace(asked, request=replace(asked.request, model="")))
        assert stream.failed.reason == "EMBEDDINGS_ONLY"


async def test_a_text_that_another_cache_scope_gave_is_computed_whole(cut_node: Any, eventually: Any) -> None:
    node, stub = cut_node
    text = "7 8 9 " * 60

    def prefilled() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        counted = [line for line in lines if line.startswith('ryzanstein_worker_tokens_total{kind="prefill"')]
        return float(counted[0].rpartition(" ")[2]) if counted else 0.0

    async def has_computed() -> bool:
        return expected - 20 < await asyncio.to_thread(prefilled) < expected + 100

    expected = await asyncio.to_thread(prefilled)
    for scope, is_new in (("", True), ("a", True), ("b", True), ("a", False), ("", False)):
        (vector,) = (await stub.Embed(texts(text, cache_scope=scope))).embeddings
        assert vector.prompt_tokens > 150
        expected += vector.prompt_tokens if is_new else 0
        await eventually(has_computed)
    assert "cache_scope" in (await refused(stub, texts(text, cache_scope="s" * 257))).message


async def test_a_cancelled_call_leaves_nothing_behind(cut_node: Any, eventually: Any) -> None:
    node, stub = cut_node
    calls = [stub.Embed(texts(*(f"{i} " * 300 for i in range(200)))) for _ in range(2)]
    await asyncio.sleep(0.3)
    for call in calls:
        call.cancel()
    answer = await stub.Embed(texts("after that"))
    assert len(answer.embeddings[0].values) == 64
    events = node.events
    assert not [each for each in events if each.get("level") == "error"]


async def test_a_model_that_generates_makes_no_vectors(node: Any) -> None:
    async with open_channel(node.address) as channel:
        error = await refused(EmbeddingServiceStub(channel), texts("a"))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NO_EMBEDDINGS")
