"""A conversation with a real cluster, over gRPC and over HTTP with the official client."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import openai
import pytest

from ryzanstein.v1 import inference_pb2 as inference

MODEL = "demo"
COUNTED = " ".join(str(n) for n in range(1, 31))


def digits(text: str) -> list[int]:
    """The numbers in an answer, whatever stands between them."""
    return [int(part) for part in "".join(c if c.isdigit() else " " for c in text).split()]


def test_a_chat_counts_over_grpc(calm: Any) -> None:
    answer = calm.client.chat("Count from 1 to 30.")
    assert digits(answer.text) == list(range(1, 31))
    assert answer.choices[0].reason == inference.FINISH_REASON_STOP
    assert answer.usage.completion_tokens == len(answer.token_ids)
    assert answer.usage.prompt_tokens == answer.prompt_tokens > 0


def test_unary_and_streamed_answers_are_equal(calm: Any) -> None:
    request = calm.client.request("Count from 3 to 12.")
    unary = calm.client.inference.Chat(request, timeout=30)
    streamed = calm.client.chat("Count from 3 to 12.")
    assert unary.choices[0].text == streamed.text
    assert list(unary.choices[0].token_ids) == streamed.token_ids


def test_a_completion_continues_a_text_as_it_stands(calm: Any) -> None:
    request = inference.CompleteRequest(
        text="<|user|>Count from 1 to 5.<|end|><|assistant|>", sampling=inference.SamplingParams(temperature=0, max_tokens=8)
    )
    reply = calm.client.inference.Complete(request, timeout=30)
    assert len(reply.choices[0].token_ids) <= 8
    assert reply.usage.prompt_tokens > 0


def test_a_session_recalls_what_was_said_in_earlier_turns(calm: Any) -> None:
    session = "recall-over-grpc"
    calm.client.chat("My name is Tavik.", session_id=session)
    calm.client.chat("Count from 1 to 10.", session_id=session)
    answer = calm.client.chat("What is my name?", session_id=session)
    assert "Tavik" in answer.text
    stored = calm.client.sessions.GetSession(inference.GetSessionRequest(session_id=session), timeout=5).session
    assert [message.role for message in stored.messages] == [inference.ROLE_USER, inference.ROLE_ASSISTANT] * 3
    assert stored.node_id == answer.node_id


def test_a_session_stays_on_its_node_and_reuses_its_cache(calm: Any) -> None:
    nodes, cached = set(), []
    for turn in ("My name is Oruna.", "Count from 1 to 20.", "Count from 1 to 20.", "What is my name?"):
        answer = calm.client.chat(turn, session_id="sticky")
        nodes.add(answer.node_id)
        cached.append(answer.usage.cached_prompt_tokens)
    assert len(nodes) == 1
    assert cached[-1] >= 64


def test_sessions_spread_over_both_nodes(calm: Any) -> None:
    assert {calm.client.chat("Hello!", session_id=f"spread-{i}").node_id for i in range(16)} == set(calm.cluster.node_ids)


def test_two_choices_with_seeds_are_reproducible_and_differ(calm: Any) -> None:
    ask = ("Repeat: river stone moon",)
    params = {"temperature": 1.8, "seed": 11, "n": 2, "max_tokens": 24}
    first, second = calm.client.chat(*ask, **params), calm.client.chat(*ask, **params)
    assert [first.choices[i].token_ids for i in (0, 1)] == [second.choices[i].token_ids for i in (0, 1)]
    assert first.choices[0].token_ids != first.choices[1].token_ids
    assert first.usage.completion_tokens == sum(len(choice.token_ids) for choice in first.choices.values())


def test_batch_mates_do_not_change_a_seeded_answer(calm: Any) -> None:
    params = {"temperature": 1.2, "seed": 5, "max_tokens": 40, "frequency_penalty": 0.5, "user": "one-node"}
    alone = calm.client.chat("Count from 5 to 25.", **params)
    crowd = [
        threading.Thread(target=calm.client.chat, args=(f"Count from {i} to {i + 40}.",), kwargs={"user": "one-node"})
        for i in range(8)
    ]
    for thread in crowd:
        thread.start()
    among = calm.client.chat("Count from 5 to 25.", **params)
    for thread in crowd:
        thread.join()
    assert among.token_ids == alone.token_ids


def test_a_stop_string_ends_the_answer_before_it(calm: Any) -> None:
    whole = calm.client.chat("Count from 1 to 30.")
    stopped = calm.client.chat("Count from 1 to 30.", stop=["12"])
    assert stopped.text == whole.text[: whole.text.index("12")]
    assert stopped.choices[0].reason == inference.FINISH_REASON_STOP


def test_logprobs_come_with_every_token_and_name_the_alternatives(calm: Any) -> None:
    reply = calm.client.inference.Chat(calm.client.request("Hello!", logprobs=3), timeout=30)
    choice = reply.choices[0]
    assert len(choice.logprobs) == len(choice.token_ids)
    assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in choice.logprobs)
    greedy = [entry.top[0].token_id for entry in choice.logprobs]
    assert greedy == list(choice.token_ids)


def test_a_cancelled_generation_frees_its_blocks(calm: Any, holds: Any) -> None:
    request = inference.StreamChatRequest(chat=calm.client.request("Hello!", ignore_eos=True, max_tokens=1900))
    stream = calm.client.inference.StreamChat(request, timeout=60)
    started = next(stream).event.started
    next(stream)
    assert calm.status(started.node_id).kv_blocks_held > 0
    cancel = inference.CancelGenerationRequest(generation_id=started.generation_id)
    calm.client.inference.CancelGeneration(cancel, timeout=5)
    reasons = [r.event.finished.finish_reason for r in stream if r.event.WhichOneof("kind") == "finished"]
    assert reasons == [inference.FINISH_REASON_CANCELLED]
    assert holds(lambda: calm.status(started.node_id).kv_blocks_held == 0, 5)


def test_a_deadline_ends_a_generation_and_frees_its_blocks(calm: Any, holds: Any) -> None:
    request = calm.client.request("Hello!", ignore_eos=True, max_tokens=1900)
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        calm.client.inference.Chat(request, timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 5
    assert holds(lambda: all(calm.status(node).kv_blocks_held == 0 for node in calm.cluster.node_ids), 5)


def test_a_client_that_lost_its_connection_continues_at_its_index(calm: Any) -> None:
    whole = calm.client.chat("Count from 1 to 50.")
    request = inference.StreamChatRequest(chat=calm.client.request("Count from 1 to 50."))
    stream, answer = calm.client.inference.StreamChat(request, timeout=30), None
    from_index = {}
    answer = type(whole)()
    for response in stream:
        calm.client.take(response.event, answer)
        if answer.choices and len(answer.token_ids) >= 10:
            stream.cancel()
            break
    from_index[0] = len(answer.token_ids)
    attach = inference.AttachGenerationRequest(generation_id=answer.generation_id, from_index=from_index)
    calm.client.read(calm.client.inference.AttachGeneration(attach, timeout=30), answer)
    assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)


def test_models_and_token_counts_are_reported(calm: Any) -> None:
    models = calm.client.inference.ListModels(inference.ListModelsRequest(), timeout=5).models
    assert [(model.name, model.ready_nodes) for model in models] == [(MODEL, 2)]
    chat = calm.client.request("Count from 1 to 30.")
    count = inference.CountTokensRequest(model=MODEL, messages=inference.Messages(messages=chat.messages))
    assert calm.client.inference.CountTokens(count, timeout=5).tokens == calm.client.chat("Count from 1 to 30.").prompt_tokens


@pytest.fixture
def sdk(calm: Any) -> Any:
    with openai.OpenAI(base_url=f"{calm.cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_chats(calm: Any, sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count from 1 to 30."}], temperature=0
    )
    assert digits(str(reply.choices[0].message.content)) == list(range(1, 31))
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.choices[0].message.content == calm.client.chat("Count from 1 to 30.").text


def test_the_official_client_streams(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count from 1 to 30."}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert digits(text) == list(range(1, 31))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert len(chunks) > 10


def test_http_and_grpc_share_a_session(calm: Any, sdk: openai.OpenAI) -> None:
    sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "My name is Belkor."}],
        temperature=0,
        extra_body={"session_id": "both-faces"},
    )
    assert "Belkor" in calm.client.chat("What is my name?", session_id="both-faces").text


def test_the_official_client_sees_typed_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=9)
