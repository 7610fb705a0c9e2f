"""The gRPC face over scripted nodes: what a client sees, and what it is told when it asks for too much."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.requests import chat_from_wire

NO_NODE = "127.0.0.1:9"


def chat(text: str = "hello", sampling: dict[str, Any] | None = None, **more: Any) -> inference.ChatRequest:
    messages = more.pop("messages", [inference.Message(role=inference.ROLE_USER, content=text)])
    return inference.ChatRequest(messages=messages, sampling=inference.SamplingParams(**(sampling or {})), **more)


def stream_of(client: Any, request: inference.ChatRequest, **call: Any) -> Any:
    return client.inference.StreamChat(inference.StreamChatRequest(chat=request), **call)


async def read(stream: Any) -> list[inference.GenerationEvent]:
    return [response.event async for response in stream]


async def refused(call: Any) -> RyzansteinError:
    ending = read(call) if hasattr(call, "__aiter__") else call
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await ending
    return error_from_rpc(failure.value)


@pytest.fixture
async def client(start_node: Any, start_router: Any) -> Any:
    return await start_router(await start_node("a"))


async def test_a_stream_is_started_then_every_index_once_then_finished(client: Any) -> None:
    events = await read(stream_of(client, chat(sampling={"max_tokens": 20})))
    assert (events[0].started.node_id, events[0].started.model, events[0].started.prompt_tokens) == ("a", "demo", 7)
    deltas = [event.delta for event in events[1:-1]]
    assert [delta.first_index for delta in deltas] == [sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))]
    assert [token for delta in deltas for token in delta.token_ids] == [1000 + i for i in range(20)]
    assert "".join(delta.text for delta in deltas) == "".join(f"0.{i} " for i in range(20))
    usage = events[-1].finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (7, 20, 3)


async def test_chat_returns_every_choice_whole(client: Any) -> None:
    answer = await client.inference.Chat(chat(sampling={"max_tokens": 3, "n": 2, "logprobs": 1}))
    assert [choice.text for choice in answer.choices] == ["0.0 0.1 0.2 ", "1.0 1.1 1.2 "]
    assert [list(choice.token_ids) for choice in answer.choices] == [[1000, 1001, 1002], [2000, 2001, 2002]]
    assert [choice.finish_reason for choice in answer.choices] == [inference.FINISH_REASON_LENGTH] * 2
    assert [len(choice.logprobs) for choice in answer.choices] == [3, 3]
    assert answer.choices[1].logprobs[2].top[0].token_id == 2
    assert (answer.usage.completion_tokens, answer.node_id, answer.model) == (6, "a", "demo")


async def test_complete_continues_a_text_and_token_ids(client: Any) -> None:
    sampling = inference.SamplingParams(max_tokens=2)
    text = await client.inference.Complete(inference.CompleteRequest(text="once", sampling=sampling))
    ids = inference.CompleteRequest(token_ids=inference.TokenIds(ids=[1, 2]), sampling=sampling)
    events = await read(client.inference.StreamComplete(inference.StreamCompleteRequest(complete=ids)))
    assert text.choices[0].text == "0.0 0.1 "
    assert [event.WhichOneof("kind") for event in events][:: len(events) - 1] == ["started", "finished"]


async def test_models_and_token_counts_come_from_the_nodes(client: Any) -> None:
    models = (await client.inference.ListModels(inference.ListModelsRequest())).models
    assert [(model.name, model.context_length, model.ready_nodes) for model in models] == [("demo", 4096, 1)]
    counted = await client.inference.CountTokens(inference.CountTokensRequest(text="one two three"))
    assert counted.tokens == 3
    messages = inference.Messages(messages=[inference.Message(role=inference.ROLE_USER, content="one two")])
    assert (await client.inference.CountTokens(inference.CountTokensRequest(messages=messages))).tokens == 2


async def test_what_a_node_says_to_a_count_reaches_the_client(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node(
        "a", refuse=RyzansteinError("no template", Code.INVALID_ARGUMENT, "NO_TEMPLATE", {"field": "messages"})
    )
    client = await start_router(node)
    error = await refused(client.inference.CountTokens(inference.CountTokensRequest(text="x")))
    assert (error.code, error.reason, error.metadata) == (Code.INVALID_ARGUMENT, "NO_TEMPLATE", {"field": "messages"})
    error = await refused(client.inference.CountTokens(inference.CountTokensRequest()))
    assert error.violations[0].field == "prompt"
    node.state = worker.NODE_STATE_DRAINING
    await until(lambda: not client.router.core.ready)
    assert (await refused(client.inference.CountTokens(inference.CountTokensRequest(text="x")))).reason == "NO_NODES"


async def test_an_error_of_a_node_carries_the_details_that_its_code_asks_for(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    node.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"prompt_tokens": "9"})
    assert (await refused(client.inference.Chat(chat()))).violations[0].field == "sampling.max_tokens"
    node.refuse = RyzansteinError("gone", Code.NOT_FOUND, "MODEL_NOT_FOUND", {"model": "demo"})
    assert (await refused(client.inference.Chat(chat()))).resource == ("model", "demo")
    node.refuse = RyzansteinError("?", 99, "ODD")  # type: ignore[arg-type]
    assert (await refused(client.inference.Chat(chat()))).code is Code.INTERNAL


async def test_the_node_gets_model_seed_deadline_and_ids_that_the_client_left_out(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    metadata = (("x-request-id", "r-1"), ("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"))
    await client.inference.Chat(chat(), metadata=metadata)
    await client.inference.Chat(chat(), timeout=60)
    first, second = node.submits
    assert (first.model, first.request_id, first.attempt, first.sampling.n) == ("demo", "r-1", 0, 1)
    assert first.traceparent == "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    assert first.sampling.seed != second.sampling.seed
    assert first.deadline.seconds - second.deadline.seconds > 500


async def test_a_client_that_left_attaches_again_and_misses_nothing(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a", step_s=0.005))
    stream = stream_of(client, chat(sampling={"max_tokens": 60}))
    seen: list[int] = []
    async for response in stream:
        seen.extend(response.event.delta.token_ids)
        if response.event.HasField("started"):
            generation_id = response.event.started.generation_id
        if len(seen) >= 5:
            break
    stream.cancel()
    attach = inference.AttachGenerationRequest(generation_id=generation_id, from_index={0: len(seen)})
    events = await read(client.inference.AttachGeneration(attach))
    assert events[0].started.generation_id == generation_id
    assert events[1].delta.first_index == len(seen)
    seen += [token for event in events for token in event.delta.token_ids]
    assert seen == [1000 + i for i in range(60)]
    assert events[-1].finished.usage.completion_tokens == 60
    replay = await read(client.inference.AttachGeneration(inference.AttachGenerationRequest(generation_id=generation_id)))
    assert [token for event in replay for token in event.delta.token_ids] == seen
    assert client.value("generations_reattached_total") == 2


async def test_many_readers_follow_one_generation(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a", step_s=0.005))
    stream = aiter(stream_of(client, chat(sampling={"max_tokens": 40, "n": 2})))
    generation_id = (await anext(stream)).event.started.generation_id
    attach = inference.AttachGenerationRequest(generation_id=generation_id, from_index={1: 30})
    readings = await asyncio.gather(*(read(client.inference.AttachGeneration(attach)) for _ in range(5)))
    for events in readings:
        by_choice = {c: [t for e in events if e.delta.choice == c for t in e.delta.token_ids] for c in (0, 1)}
        assert by_choice == {0: [1000 + i for i in range(40)], 1: [2000 + i for i in range(30, 40)]}


async def test_nobody_comes_back_and_the_generation_is_cancelled_then_forgotten(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, reattach_window_s=0.2)
    stream = stream_of(client, chat(sampling={"max_tokens": 4000}))
    generation_id = (await anext(aiter(stream))).event.started.generation_id
    stream.cancel()
    await until(lambda: bool(node.cancels))
    assert client.value("generations_abandoned_total") == 1
    attach = inference.AttachGenerationRequest(generation_id=generation_id)
    error = await refused(client.inference.AttachGeneration(attach))
    assert (error.code, error.resource) == (Code.NOT_FOUND, ("generation", generation_id))


async def test_a_disconnect_cancels_at_once_when_the_client_said_so(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node)
    request = chat(sampling={"max_tokens": 4000})
    stream = stream_of(client, request, metadata=(("x-cancel-on-disconnect", "true"),))
    await anext(aiter(stream))
    stream.cancel()
    await until(lambda: bool(node.cancels))
    assert client.value("generations_abandoned_total") == 0


async def test_a_unary_call_that_is_given_up_cancels_its_generation(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node)
    call = client.inference.Chat(chat(sampling={"max_tokens": 4000}))
    await until(lambda: bool(node.submits))
    call.cancel()
    await until(lambda: bool(node.cancels))
    assert node.cancels == [submit.handle for submit in node.submits]


async def test_cancel_ends_every_choice_that_runs_and_frees_the_node(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node)
    stream = aiter(stream_of(client, chat(sampling={"max_tokens": 4000, "n": 2})))
    generation_id = (await anext(stream)).event.started.generation_id
    await client.inference.CancelGeneration(inference.CancelGenerationRequest(generation_id=generation_id))
    events = [response.event async for response in stream]
    ends = [event.finished for event in events if event.HasField("finished")]
    assert [(end.choice, end.finish_reason) for end in ends] == [
        (0, inference.FINISH_REASON_CANCELLED),
        (1, inference.FINISH_REASON_CANCELLED),
    ]
    assert ends[-1].usage.completion_tokens == sum(len(event.delta.token_ids) for event in events)
    await until(lambda: node.num_running == 0)
    again = inference.CancelGenerationRequest(generation_id=generation_id)
    assert (await refused(client.inference.CancelGeneration(again))).code is Code.NOT_FOUND


async def test_a_generation_that_no_node_has_accepted_can_be_cancelled(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    node.state = worker.NODE_STATE_RECOVERING
    await until(lambda: not client.router.core.ready)
    generation_id = await client.router.core.submit(chat_from_wire(chat()))
    await client.inference.CancelGeneration(inference.CancelGenerationRequest(generation_id=generation_id))
    events = await read(client.inference.AttachGeneration(inference.AttachGenerationRequest(generation_id=generation_id)))
    assert [event.WhichOneof("kind") for event in events] == ["started", "finished"]
    assert events[-1].finished.finish_reason == inference.FINISH_REASON_CANCELLED
    assert client.value("generations_waiting") == 0


async def test_a_deadline_that_passes_ends_the_generation_and_frees_the_node(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, default_deadline_s=0.2)
    error = await refused(stream_of(client, chat(sampling={"max_tokens": 4000})))
    assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    await until(lambda: node.num_running == 0)


BAD = [
    ("messages", chat(messages=[])),
    ("messages[0].role", chat(messages=[inference.Message(content="x")])),
    ("messages", chat("x" * 300)),
    ("messages", chat(messages=[inference.Message(role=inference.ROLE_USER)] * 9)),
    ("model", chat(model="m" * 129)),
    ("session_id", chat(session_id="s" * 129)),
    ("user", chat(user="u" * 16_385)),
    ("sampling.temperature", chat(sampling={"temperature": 2.5})),
    ("sampling.temperature", chat(sampling={"temperature": float("nan")})),
    ("sampling.top_p", chat(sampling={"top_p": 0})),
    ("sampling.n", chat(sampling={"n": 17})),
    ("sampling.logprobs", chat(sampling={"logprobs": 21})),
    ("sampling.stop", chat(sampling={"stop": ["x"] * 17})),
    ("sampling.min_tokens", chat(sampling={"min_tokens": 9, "max_tokens": 8})),
]


@pytest.mark.parametrize(("field", "request_"), BAD, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD)])
async def test_a_bad_request_names_its_field(start_node: Any, start_router: Any, field: str, request_: Any) -> None:
    node = await start_node("a")
    client = await start_router(node, max_prompt_chars=256, max_messages=8)
    error = await refused(client.inference.Chat(request_))
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert [violation.field for violation in error.violations] == [field]
    assert node.submits == []


async def test_an_unknown_model_is_not_found_and_a_missing_one_must_be_given_when_there_are_two(
    start_node: Any, start_router: Any
) -> None:
    client = await start_router(await start_node("a"), await start_node("b", model="other"), ready_nodes=2)
    error = await refused(client.inference.Chat(chat(model="none")))
    assert (error.code, error.reason, error.resource) == (Code.NOT_FOUND, "MODEL_NOT_FOUND", ("model", "none"))
    error = await refused(client.inference.Chat(chat()))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "model")
    answer = await client.inference.Chat(chat(model="other", sampling={"max_tokens": 1}))
    assert answer.node_id == "b"


async def test_without_any_node_a_request_is_refused_at_once(start_router: Any) -> None:
    client = await start_router(ready_nodes=0, nodes=NO_NODE)
    for call in (client.inference.Chat(chat()), client.inference.CountTokens(inference.CountTokensRequest(text="x"))):
        error = await refused(call)
        assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "NO_NODES", 1.0)


async def test_above_the_bound_of_running_generations_the_queue_is_full(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, max_running=2)
    streams = [stream_of(client, chat(sampling={"max_tokens": 60})) for _ in range(2)]
    await until(lambda: client.router.core.running == 2)
    error = await refused(client.inference.Chat(chat()))
    assert (error.code, error.reason, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", 1.0)
    assert error.metadata == {"waiting": "2", "bound": "2"}
    assert client.value("refused_total", reason="queue_full") == 1
    for stream in streams:
        assert len(await read(stream)) > 2


async def test_one_tenant_cannot_take_all_the_room_and_there_is_always_some_for_another(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, max_running=18)
    heavy = {"metadata": (("x-tenant-id", "heavy"),)}
    sampling = {"max_tokens": 60}
    streams = [stream_of(client, chat(sampling=sampling), **heavy) for _ in range(16)]
    await until(lambda: client.router.core.running == 16)
    error = await refused(client.inference.Chat(chat(), **heavy))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert client.value("refused_total", reason="tenant_share") == 1
    streams.append(stream_of(client, chat(sampling=sampling, user="light")))
    for stream in streams:
        assert len(await read(stream)) > 2
    assert {submit.tenant for submit in node.submits} == {"heavy", "light"}


@pytest.mark.parametrize("tenant", ["t" * 129, "two words"])
async def test_a_tenant_that_no_gateway_sends_is_refused(client: Any, tenant: str) -> None:
    error = await refused(client.inference.Chat(chat(), metadata=(("x-tenant-id", tenant),)))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "x-tenant-id")


@pytest.mark.parametrize("priority", [-11, 11])
async def test_a_priority_out_of_bounds_is_refused(client: Any, priority: int) -> None:
    for call in (
        client.inference.Chat(chat(priority=priority)),
        client.inference.Complete(inference.CompleteRequest(text="x", priority=priority)),
    ):
        error = await refused(call)
        assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "priority")
        assert "[-10, 10]" in error.violations[0].description


async def test_tenant_and_priority_reach_the_node(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    await client.inference.Chat(chat(priority=3, user="u", sampling={"max_tokens": 1}), metadata=(("x-tenant-id", "acme"),))
    await client.inference.Chat(chat(user="u", sampling={"max_tokens": 1}))
    await client.inference.Complete(inference.CompleteRequest(text="x", priority=-2))
    assert [(submit.tenant, submit.priority) for submit in node.submits] == [("acme", 3), ("u", 0), ("", -2)]


async def test_above_the_bound_of_waiting_generations_the_queue_is_full(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a")
    client = await start_router(node, max_waiting=1)
    node.state = worker.NODE_STATE_RECOVERING
    await until(lambda: not client.router.core.ready)
    waiting = client.inference.Chat(chat(sampling={"max_tokens": 1}))
    await until(lambda: client.router.core.running == 1)
    assert (await refused(client.inference.Chat(chat()))).reason == "QUEUE_FULL"
    node.state = worker.NODE_STATE_READY
    assert (await waiting).choices[0].text == "0.0 "


async def test_ended_generations_are_forgotten_early_when_they_take_too_much_room(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"), max_retained_tokens=30)
    ids = [(await client.inference.Chat(chat(sampling={"max_tokens": 10}))).generation_id for _ in range(4)]
    assert client.value("generations_evicted_total") == 2
    attach = [client.inference.AttachGeneration(inference.AttachGenerationRequest(generation_id=i)) for i in ids]
    assert (await refused(attach[0])).code is Code.NOT_FOUND
    assert len(await read(attach[3])) > 2


async def test_an_index_of_a_choice_that_was_not_asked_for_is_refused(client: Any) -> None:
    generation_id = (await client.inference.Chat(chat(sampling={"max_tokens": 1}))).generation_id
    attach = inference.AttachGenerationRequest(generation_id=generation_id, from_index={1: 0})
    error = await refused(client.inference.AttachGeneration(attach))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "from_index")


async def test_what_happened_is_in_the_metrics(client: Any) -> None:
    await client.inference.Chat(chat(sampling={"max_tokens": 10}))
    await refused(client.inference.Chat(chat(model="none")))
    assert client.value("tokens_total", model="demo", node_id="a") == 10
    assert client.value("prompt_tokens_total", model="demo") == 7
    assert client.value("generations_total", model="demo", outcome="complete") == 1
    assert client.value("requests_total", face="grpc", method="Chat", code="OK") == 1
    assert client.value("requests_total", face="grpc", method="Chat", code="NOT_FOUND") == 1
    assert client.value("time_to_first_token_seconds_count", model="demo") == 1
    assert client.value("time_per_output_token_seconds_count", model="demo") == 1
    assert (client.value("generations_running"), client.value("generations_waiting")) == (0, 0)
    assert client.value("link_up", node_id="a") == 1
