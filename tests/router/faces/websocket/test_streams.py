"""Generations on a socket: what is said, in which order, and to whom."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.router.faces.http.test_stream import parse
from tests.router.faces.websocket.conftest import CHAT

from ryzanstein import errors
from ryzanstein.router.faces.websocket.limits import SocketLimits


async def test_a_stream_from_submit_to_done(client):
    await client.submit("a", body={"stream_options": {"include_usage": True}}, headers={"X-Request-Id": "r1"})
    await client.until("done")
    accepted, started, *chunks, done = client.frames
    assert accepted == {"type": "accepted", "id": "a", "generation": "chatcmpl-g0", "request_id": "r1"}
    assert started == {"type": "started", "id": "a", "generation": "chatcmpl-g0", "model": "echo", "node": "node-0"}
    assert [(chunk["choice"], chunk["index"], chunk["ended"]) for chunk in chunks] == [
        (0, 0, False),
        (0, 1, False),
        (0, 2, False),
        (0, 3, False),
        (0, 3, True),
        (None, None, False),
    ]
    assert [chunk.get("node") for chunk in chunks] == [*["node-1"] * 5, None]
    assert client.text("a") == "one two three"
    assert chunks[-1]["chunk"]["usage"]["completion_tokens"] == 3
    assert done == {"type": "done", "id": "a", "generation": "chatcmpl-g0"}


async def test_a_chunk_is_what_a_server_sent_event_says(client, face):
    """The same generation, once on a socket and once as events; only the time of creation may differ."""
    await client.submit("a", body={"logprobs": True, "top_logprobs": 1, "n": 2})
    await client.until("done")
    async with httpx.AsyncClient(trust_env=False) as http:
        delta = await http.get(face.url.replace("ws", "http", 1).replace("/v1/ws", "/v1/generations/chatcmpl-g0/events"))
    events = [event.body for event in parse(delta.text) if event.data != "[DONE]"]
    chunks = [frame["chunk"] for frame in client.chunks("a")]

    def of(choice, delta):
        text = "".join(
            chunk["choices"][0]["delta"].get("content", "") for chunk in delta if chunk["choices"][0]["index"] == choice
        )
        rows = [
            row
            for chunk in delta
            if chunk["choices"][0]["index"] == choice
            for row in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
        ]
        return text, rows

    assert chunks[0] | {"created": 0} == events[0] | {"created": 0}
    assert chunks[-1].keys() == events[-1].keys()
    assert [of(choice, chunks) for choice in (0, 1)] == [of(choice, events) for choice in (0, 1)]


async def test_many_streams_at_once_do_not_mix(client):
    texts = {f"s{number}": " ".join(f"{number}.{word}" for word in range(20)) for number in range(50)}
    for stream_id, text in texts.items():
        await client.submit(stream_id, text)
    for _ in texts:
        await client.until("done")
    assert {stream_id: client.text(stream_id) for stream_id in texts} == texts


async def test_a_completion_is_a_text_completion(client):
    await client.send("submit", id="a", url="/v1/completions", body={"prompt": "one two"})
    await client.until("done")
    assert client.frames[0]["generation"] == "cmpl-g0"
    assert "".join(frame["chunk"]["choices"][0]["text"] for frame in client.chunks("a")) == "one two"


async def test_an_id_is_free_again_when_its_stream_has_ended(client):
    for _ in range(2):
        await client.submit("a")
        await client.until("done", "a")
    assert client.text("a") == "one two three" * 2


async def test_a_cancelled_stream_ends_as_such(client, face):
    face.core.pause_at = 1
    await client.submit("a")
    await client.until("chunk")
    await client.send("cancel", id="a")
    await client.until("done")
    kinds = [frame["type"] for frame in client.frames]
    assert kinds.count("cancelled") == 1
    assert client.chunks("a")[-1]["chunk"]["choices"][0]["finish_reason"] == "cancelled"
    assert face.core.cancelled == ["g0"]


async def test_any_generation_is_cancelled_by_its_own_id(client, face):
    face.core.pause_at = 1
    await client.submit("a")
    await client.until("chunk")
    async with face.connect() as other:
        stranger = type(client)(other)
        await stranger.send("cancel", generation="chatcmpl-g0")
        assert await stranger.receive() == {"type": "cancelled", "generation": "chatcmpl-g0"}
        await stranger.send("cancel", generation="chatcmpl-g0")
        failed = await stranger.receive()
    assert (failed["type"], failed["status"], failed["generation"]) == ("error", 404, "chatcmpl-g0")
    assert "id" not in failed
    await client.until("done")


async def test_an_attached_stream_begins_at_its_index(client, face):
    await client.submit("a", "one two three four")
    await client.until("done")
    await client.send("attach", id="b", generation="chatcmpl-g0", from_index={"0": 2}, include_usage=True)
    await client.until("done")
    assert client.text("b") == "three four"
    assert client.chunks("b")[-1]["chunk"]["usage"]["completion_tokens"] == 4
    assert "role" not in client.chunks("b")[0]["chunk"]["choices"][0]["delta"]


@pytest.mark.parametrize("cut", range(1, 9))
async def test_a_stream_cut_anywhere_and_attached_on_another_socket_is_the_whole(face, client, cut):
    await client.submit("a", "one two three", body={"n": 2, "logprobs": True})
    while len(client.chunks("a")) < cut:
        await client.receive()
    seen = client.chunks("a")
    position = {str(frame["choice"]): frame["index"] for frame in seen}
    ended = [frame["choice"] for frame in seen if frame["ended"]]
    async with face.connect() as socket:
        other = type(client)(socket, list(seen))
        await other.send("attach", id="a", generation="chatcmpl-g0", from_index=position, ended=ended)
        await other.until("done")
    for choice in range(2):
        assert other.text("a", choice) == "one two three"
        of_choice = [frame["chunk"]["choices"][0] for frame in other.chunks("a") if frame["choice"] == choice]
        rows = [row["token"] for delta in of_choice for row in (delta["logprobs"] or {}).get("content", [])]
        assert rows == ["one ", "two ", "three"]
        assert [delta["finish_reason"] for delta in of_choice if delta["finish_reason"]] == ["stop"]
        assert [delta["delta"].get("role") for delta in of_choice].count("assistant") == 1


async def test_errors_are_those_of_http_each_to_its_request(client, face):
    await client.submit("a", body={"temperature": 9})
    failed = await client.receive()
    async with httpx.AsyncClient(trust_env=False) as http:
        url = face.url.replace("ws", "http", 1).replace("/v1/ws", "/v1/chat/completions")
        answer = await http.post(url, json={"messages": [{"role": "user", "content": "x"}], "temperature": 9})
    assert (failed["type"], failed["id"], failed["status"]) == ("error", "a", 400)
    assert failed["error"] == answer.json()["error"]
    await client.submit("b")
    await client.until("done", "b")


async def test_an_error_with_a_time_to_retry_says_when(client, face):
    face.core.refusal = errors.queue_full(5, 4, 1.5)
    await client.submit("a")
    failed = await client.receive()
    assert (failed["status"], failed["error"]["code"], failed["retry_after_ms"]) == (429, "queue_full", 1500)


@pytest.mark.parametrize("field", ["guided_regex", "guided_json", "response_format"])
async def test_an_error_names_the_field_in_which_the_client_wrote_the_constraint(client, face, field):
    face.core.refusal = errors.invalid("sampling.constraint.regex", "is not supported")
    form = {"guided_regex": "a", "guided_json": {}, "response_format": {"type": "json_object"}}
    await client.submit("a", body={field: form[field]})
    failed = await client.receive()
    assert (failed["error"]["param"], failed["error"]["message"]) == (field, f"{field}: is not supported")


async def test_what_no_engine_supports_is_named_as_over_http(client, face):
    face.core.refusal = errors.engine_lacks("echo", "sampling.min_p", "llama.cpp b7200")
    await client.submit("a")
    failed = await client.until("error")
    assert (failed["status"], failed["error"]["code"], failed["error"]["param"]) == (400, "engine_lacks", "min_p")
    assert failed["error"]["metadata"] == {"model": "echo", "engine": "llama.cpp b7200"}


async def test_an_error_in_mid_stream_ends_that_stream_alone(client, face):
    face.core.fail_at, face.core.error = 1, errors.unavailable("NODE_LOST", "gone")
    await client.submit("a")
    failed = await client.until("error")
    assert (failed["id"], failed["generation"], failed["error"]["code"]) == ("a", "chatcmpl-g0", "node_lost")
    face.core.fail_at = None
    await client.submit("a")
    await client.until("done", "a")


async def test_a_bug_of_ours_is_internal_and_has_no_stack(client, face):
    face.core.refusal = ValueError("nobody has thought of this")
    await client.submit("a")
    failed = await client.receive()
    assert (failed["status"], failed["error"]["code"]) == (500, "internal")
    assert "nobody" not in failed["error"]["message"]


class TestCredit:
    @pytest.fixture
    def limits(self):
        return SocketLimits(unread_s=0.2, give_up_s=1.0)

    async def test_no_more_chunks_than_credit(self, client):
        await client.submit("a", "1 2 3 4 5 6", credit=2)
        await client.quiet()
        assert len(client.chunks("a")) == 2
        await client.send("credit", id="a", chunks=1)
        await client.quiet()
        assert len(client.chunks("a")) == 3
        await client.send("credit", id="a", chunks=100)
        await client.until("done")
        assert client.text("a") == "1 2 3 4 5 6"

    async def test_a_stream_without_credit_slows_no_other(self, client):
        await client.submit("a", credit=0)
        await client.submit("b")
        await client.until("done")
        assert (client.chunks("a"), client.text("b")) == ([], "one two three")

    async def test_a_stream_without_credit_has_no_reader_until_it_has(self, client, face, eventually):
        await client.submit("a", credit=1)
        await client.until("chunk")
        await eventually(lambda: face.core.readers == 0, "no reader")
        assert face.value("websocket_streams_unread_total") == 1
        await client.send("credit", id="a", chunks=100)
        await client.until("done")
        assert client.text("a") == "one two three"
        assert len(client.chunks("a")) == len({frame["index"] for frame in client.chunks("a")}) + 1

    async def test_log_probabilities_stay_aligned_over_a_pause(self, client, face, eventually):
        await client.submit("a", credit=2, body={"logprobs": True})
        await eventually(lambda: face.value("websocket_streams_unread_total") == 1, "unread")
        await client.send("credit", id="a", chunks=100)
        await client.until("done")
        delta = [frame["chunk"]["choices"][0] for frame in client.chunks("a")]
        assert [row["token"] for one in delta for row in (one["logprobs"] or {}).get("content", [])] == [
            "one ",
            "two ",
            "three",
        ]

    async def test_a_pause_before_the_seen_tokens_are_read_again_moves_no_offset(self, client, face, eventually):
        """An attached stream with log probabilities reads each choice from its first token, also after a pause."""
        body = {"prompt": "one two three four", "n": 2, "logprobs": 1}
        await client.send("submit", id="a", url="/v1/completions", body=body)
        await client.until("done")
        await client.send("attach", id="b", generation="cmpl-g0", from_index={"0": 2, "1": 3}, credit=0)
        await eventually(lambda: face.value("websocket_streams_unread_total") == 1, "unread")
        await client.send("credit", id="b", chunks=100)
        await client.until("done", "b")
        logprobs = {
            frame["choice"]: frame["chunk"]["choices"][0]["logprobs"] for frame in client.chunks("b") if not frame["ended"]
        }
        assert [(rows["tokens"], rows["text_offset"]) for _, rows in sorted(logprobs.items())] == [
            (["three ", "four"], [8, 14]),
            (["four"], [14]),
        ]

    async def test_without_credit_for_long_the_client_is_told_to_attach(self, client):
        await client.submit("a", credit=1)
        failed = await client.until("error")
        assert (failed["status"], failed["error"]["code"]) == (503, "generation_paused")
        assert failed["retry_after_ms"] > 0
        await client.send("attach", id="b", generation=failed["generation"], from_index={"0": 0})
        await client.until("done")
        assert client.text("b") == "one two three"

    async def test_credit_for_a_stream_that_has_ended_is_nothing(self, client):
        await client.send("credit", id="gone", chunks=1)
        await client.submit("b")
        await client.until("done", "b")
        assert [frame["type"] for frame in client.frames].count("error") == 0


class TestWhenTheClientLeaves:
    @pytest.mark.parametrize(
        ("headers", "cancelled"),
        [
            ({}, []),
            ({"X-Cancel-On-Disconnect": "true"}, ["g0"]),
            ({"X-Run-Detached": "true"}, []),
            ({"X-Cancel-On-Disconnect": "true", "Idempotency-Key": "k"}, []),
        ],
    )
    async def test_the_generation_ends_as_it_chose(self, face, client, eventually, headers, cancelled):
        face.core.pause_at = 1
        await client.submit("a", headers=headers)
        await client.until("chunk")
        await client.socket.close()
        await eventually(lambda: face.core.readers == 0, "nobody reads")
        await asyncio.sleep(0.05)
        assert face.core.cancelled == cancelled
        assert face.core.requests[0].detached is ("X-Run-Detached" in headers)

    async def test_headers_of_the_handshake_hold_for_all_and_a_message_may_say_otherwise(self, face, eventually, client):
        face.core.pause_at = 1
        headers = {"X-Cancel-On-Disconnect": "true", "X-Tenant-Id": "acme"}
        async with face.connect(additional_headers=headers) as socket:
            other = type(client)(socket)
            await other.submit("a")
            await other.submit("b", headers={"X-Run-Detached": "true"})
            await other.until("chunk", "a")
            await other.until("chunk", "b")
        await eventually(lambda: face.core.cancelled == ["g0"], "only the first")
        assert [request.tenant for request in face.core.requests] == ["acme", "acme"]
        assert [request.detached for request in face.core.requests] == [False, True]

    async def test_a_connection_that_breaks_is_a_client_that_left(self, face, client, eventually):
        face.core.pause_at = 1
        await client.submit("a", headers={"X-Cancel-On-Disconnect": "true"})
        await client.until("chunk")
        client.socket.transport.abort()
        await eventually(lambda: face.core.cancelled == ["g0"], "cancelled")
        await eventually(lambda: face.value("websockets_closed_total", code="1006") == 1, "counted")
        assert face.value("websockets_open") == 0


async def test_the_deadline_key_and_session_of_a_message_reach_the_core(client, face):
    headers = {
        "X-Request-Timeout-Ms": "5000",
        "Idempotency-Key": '"k"',
        "X-Session-Id": "tea",
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    }
    await client.submit("a", headers=headers)
    await client.until("done")
    (request,) = face.core.requests
    assert request.session_id == "tea"
    assert request.key is not None
    assert request.traceparent == headers["traceparent"]
    assert request.deadline is not None


async def test_requests_are_counted_by_what_became_of_them(client, face, eventually):
    await client.submit("a")
    await client.until("done")
    await client.submit("b", body={"temperature": 9})
    await client.until("error")
    await client.submit("c", url="/v1/nothing")
    await client.until("error")
    for method, code in ((CHAT, "200"), (CHAT, "400"), ("unknown", "400")):
        labels = {"face": "websocket", "method": method, "code": code}
        await eventually(lambda labels=labels: face.value("requests_total", **labels) == 1, labels)
