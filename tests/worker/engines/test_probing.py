"""Which server is at an address, and whether it can be used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.worker.engines.recorded import DONE, llama_end, llama_event, sglang_event, trtllm_event, vllm_event, vllm_usage
from tests.worker.engines.stub_server import Exchange, Stub, stub_server

from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineRefused, EngineUnreachable
from ryzanstein.worker.engines.remote.probing import DIALECTS, probe


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with stub_server() as stub:
        yield stub


@pytest.fixture
async def client(stub: Stub) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineAddress.parse(stub.address), silence_s=2.0)
    yield client
    await client.close()


def models(owner: str, **more: object) -> dict[str, object]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": owner, **more}]}


def be_vllm(stub: Stub, owner: str = "vllm") -> None:
    stub.at("/v1/models", models(owner, max_model_len=4096, parent=None, root="/models/m"))
    stub.at("/version", {"version": "0.33.0"})
    stub.streams("/v1/completions", vllm_event([17], 1, "length"), vllm_usage(1), DONE)


def be_sglang(stub: Stub) -> None:
    stub.at("/v1/models", models("sglang", max_model_len=4096, root="m"))
    info = {"version": "0.5.23", "max_running_requests": None, "dp_size": 2, "model_path": "m"}
    stub.at("/server_info", {**info, "internal_states": [{"effective_max_running_requests_per_dp": 64}]})
    stub.streams("/generate", sglang_event([17], 1, {"type": "length", "length": 1}), DONE)


def be_llama_cpp(stub: Stub) -> None:
    meta = {"vocab_type": 2, "n_vocab": 1024, "n_ctx_train": 2048}
    stub.at("/v1/models", {**models("llamacpp", meta=meta), "models": [{"name": "m"}]})
    props = {"total_slots": 4, "build_info": "b7200-abc", "model_path": "m.gguf", "chat_template": ""}
    stub.at("/props", {**props, "default_generation_settings": {"id": 0, "n_ctx": 512, "params": {}}})
    stub.streams("/completion", llama_event([17], 1), llama_end(1, "limit"))


def be_trtllm(stub: Stub) -> None:
    stub.at("/v1/models", models("tensorrt_llm"))
    stub.at("/version", {"version": "1.2.1"})
    stub.streams("/v1/completions", trtllm_event([17], 1, "length"), DONE)


BEING = {"vllm": be_vllm, "sglang": be_sglang, "llama.cpp": be_llama_cpp, "tensorrt-llm": be_trtllm}
FOUND = {
    "vllm": ("vllm 0.33.0", "m", 4096, 0, 20, 0),
    "sglang": ("sglang 0.5.23", "m", 4096, 128, 0, 0),
    "llama.cpp": ("llama.cpp b7200-abc", "", 512, 4, 20, 1024),
    "tensorrt-llm": ("tensorrt-llm 1.2.1", "m", 0, 0, 0, 0),
}


@pytest.mark.parametrize("dialect", ["auto", "named"])
@pytest.mark.parametrize("name", DIALECTS)
async def test_each_kind_of_server_is_recognized(stub: Stub, client: EngineClient, name: str, dialect: str) -> None:
    BEING[name](stub)
    served = await probe(client, name if dialect == "named" else "auto")
    assert served.dialect.name == name
    numbers = (served.context_length, served.max_sequences, served.max_logprobs, served.vocabulary)
    assert (served.version, served.model, *numbers) == FOUND[name]


async def test_a_vllm_under_another_name_is_recognized_by_what_only_it_tells(stub: Stub, client: EngineClient) -> None:
    be_vllm(stub, "system")
    assert (await probe(client)).dialect.name == "vllm"


async def test_an_older_sglang_is_asked_by_its_older_path(stub: Stub, client: EngineClient) -> None:
    be_sglang(stub)
    del stub.behaviours["/server_info"]
    stub.at("/get_server_info", {"version": "0.5.1", "max_running_requests": 32})
    served = await probe(client)
    assert (served.version, served.max_sequences) == ("sglang 0.5.1", 32)


async def test_an_adapter_is_not_taken_for_the_model(stub: Stub, client: EngineClient) -> None:
    be_vllm(stub)
    adapter = {"id": "lora", "owned_by": "vllm", "parent": "m", "max_model_len": 1}
    own = {"id": "m", "owned_by": "vllm", "parent": None, "max_model_len": 4096}
    stub.at("/v1/models", {"data": [adapter, own]})
    assert (await probe(client)).model == "m"


async def test_another_server_is_refused_with_its_owner(stub: Stub, client: EngineClient) -> None:
    stub.at("/v1/models", models("library"))
    with pytest.raises(EngineRefused, match=r"none of vllm, sglang, llama\.cpp, tensorrt-llm.*'library'"):
        await probe(client)


@pytest.mark.parametrize("answer", [{"data": []}, {"data": [{"name": "m"}]}, [], "x", {"data": [{"id": "m", "parent": "n"}]}])
async def test_a_server_without_models_is_refused(stub: Stub, client: EngineClient, answer: object) -> None:
    stub.at("/v1/models", answer)
    with pytest.raises(EngineRefused):
        await probe(client)


async def test_a_web_server_is_refused(stub: Stub, client: EngineClient) -> None:
    with pytest.raises(EngineRefused, match="answered 404"):
        await probe(client)


async def test_a_wrong_key_is_refused(stub: Stub, client: EngineClient) -> None:
    stub.at("/v1/models", {"error": "Unauthorized"}, "401 Unauthorized")
    with pytest.raises(EngineRefused, match="401: Unauthorized") as refused:
        await probe(client)
    assert refused.value.status == 401


async def test_an_unknown_dialect_is_refused_by_name(stub: Stub, client: EngineClient) -> None:
    be_vllm(stub)
    with pytest.raises(EngineRefused, match=r"engine_dialect.*'ollama'"):
        await probe(client, "ollama")


async def test_a_llama_cpp_that_only_routes_is_refused(stub: Stub, client: EngineClient) -> None:
    be_llama_cpp(stub)
    stub.at("/props", {"role": "router", "max_instances": 4, "default_generation_settings": {"params": None, "n_ctx": 0}})
    with pytest.raises(EngineRefused, match="has no model of its own"):
        await probe(client)


@pytest.mark.parametrize(
    ("name", "path", "event"),
    [
        ("vllm", "/v1/completions", {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}),
        ("sglang", "/generate", {"text": "x", "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}),
        ("tensorrt-llm", "/v1/completions", {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}),
    ],
)
async def test_a_server_that_gives_no_ids_is_refused(
    stub: Stub, client: EngineClient, name: str, path: str, event: object
) -> None:
    BEING[name](stub)
    stub.streams(path, event, DONE)
    with pytest.raises(EngineRefused, match="gives no token ids"):
        await probe(client)


async def test_a_llama_cpp_that_gives_no_ids_is_refused(stub: Stub, client: EngineClient) -> None:
    be_llama_cpp(stub)

    async def behave(exchange: Exchange) -> None:
        if b'"stream":true' in exchange.body:
            await exchange.events({"content": "x", "tokens_predicted": 1}, {"content": "", "stop": True, "tokens_predicted": 1})
        else:
            await exchange.answer({"content": "x", "stop": True, "stop_type": "limit", "tokens_predicted": 1})

    stub.behaviours["/completion"] = behave
    with pytest.raises(EngineRefused, match="gives no token ids"):
        await probe(client)


async def test_a_server_that_is_not_ready_may_be_asked_again(stub: Stub, client: EngineClient) -> None:
    stub.at("/v1/models", {"error": {"message": "Loading model", "code": 503}}, "503 Service Unavailable")
    with pytest.raises(EngineUnreachable, match="Loading model"):
        await probe(client)

    async def hang(exchange: Exchange) -> None:
        await exchange.events(end=False)
        await exchange.gone.wait()

    be_vllm(stub)
    stub.behaviours["/v1/completions"] = hang
    with pytest.raises(EngineUnreachable, match="in time"):
        await asyncio.wait_for(probe(client), 10)
