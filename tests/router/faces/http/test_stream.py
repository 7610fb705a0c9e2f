"""Server-sent events as they go over the wire, and a client that comes back for the rest."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import httpx
import pytest

from ryzanstein import errors
from ryzanstein.generation.tokens import Delta, Started, Token
from ryzanstein.router.faces.http.gate import HttpLimits
from ryzanstein.router.faces.http.stream import ChunkWriter
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.dialect import AnswerForm, ChatDialect


@dataclass
class Event:
    event_id: str | None
    kind: str | None
    data: str

    @property
    def body(self):
        return json.loads(self.data)

    @property
    def choice(self):
        return self.body["choices"][0]


def parse(text):
    """Strict: every event is `id:` and `event:` at most once, one `data:` line, and a blank line."""
    events = []
    assert text.endswith("\n\n") or not text
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert fields.keys() <= {"id", "event", "data"}
        assert len(fields) == len(block.split("\n"))
        events.append(Event(fields.get("id"), fields.get("event"), fields["data"]))
    return events


async def read_events(response, count=None):
    """All events, or the first `count`."""
    text = ""
    async for part in response.aiter_text():
        text += part
        if count is not None and text.count("\n\n") >= count:
            return parse("".join(block + "\n\n" for block in text.split("\n\n")[:count]))
    return parse(text)


async def ask(http, body):
    return parse((await http.post("/v1/chat/completions", json={**body, "stream": True})).text)


def contents(events):
    """Text by choice."""
    texts: dict[int, str] = {}
    for event in events:
        if event.data != "[DONE]" and event.body.get("choices"):
            texts[event.choice["index"]] = texts.get(event.choice["index"], "") + event.choice["delta"].get("content", "")
    return texts


async def test_the_whole_stream_line_by_line(http, chat, face):
    face.core.pause_at = 1
    async with http.stream("POST", "/v1/chat/completions", json=chat("one two", stream=True)) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-ryzanstein-node"] == "node-0"
        assert "content-length" not in response.headers
        face.core.resume.set()
        events = await read_events(response)
    assert [(event.event_id, event.kind) for event in events[:-1]] == [
        ("g0:0:0", None),
        ("g0:0:1", None),
        ("g0:0:2", None),
        ("g0:0:2.", None),
    ]
    assert [event.choice["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "one "},
        {"content": "two"},
        {},
    ]
    assert [event.choice["finish_reason"] for event in events[:-1]] == [None, None, None, "stop"]
    assert (events[-1].event_id, events[-1].data) == (None, "[DONE]")
    first = events[0].body
    assert (first["object"], first["id"], first["model"]) == ("chat.completion.chunk", "chatcmpl-g0", "echo")
    assert "usage" not in first


async def test_tokens_arrive_while_the_generation_runs(http, chat, face):
    face.core.pause_at = 1
    async with http.stream("POST", "/v1/chat/completions", json=chat("one two", stream=True)) as response:
        events = await asyncio.wait_for(read_events(response, 2), 10)
        assert events[1].choice["delta"]["content"] == "one "
        assert face.core.readers == 1


async def test_an_error_in_mid_stream_is_an_error_event_and_no_done(http, chat, face, eventually):
    face.core.fail_at, face.core.error = 1, errors.unavailable("NODE_LOST", "gone")
    events = await ask(http, chat())
    assert (events[-1].kind, events[-1].event_id) == ("error", None)
    assert events[-1].body == {"error": {"message": "gone", "type": "server_error", "param": None, "code": "node_lost"}}
    assert not any(event.data == "[DONE]" for event in events)
    await eventually(lambda: face.requests_with(503) == 1, "counted by what became of it")


async def test_text_is_whole_unicode_and_line_ends_do_not_break_an_event(http, chat):
    text = "n\u00e4h \U0001f99c line\r\nbreak\u2028end data: [DONE]"
    events = await ask(http, chat(text))
    assert contents(events) == {0: text}


@pytest.mark.parametrize("cut", range(1, 4))
async def test_a_stream_with_log_probabilities_cut_anywhere_has_each_row_once(http, chat, face, cut):
    events = await ask(http, chat("one two three", logprobs=True))
    seen = events[:cut]
    position = {"Last-Event-ID": seen[-1].event_id}
    seen += parse((await http.get("/v1/generations/chatcmpl-g0/events", headers=position)).text)
    rows = [row for event in seen[:-1] for row in (event.choice["logprobs"] or {}).get("content", [])]
    assert [row["token"] for row in rows] == ["one ", "two ", "three"]
    assert contents(seen) == {0: "one two three"}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cut", range(1, 9))
async def test_a_stream_cut_anywhere_and_attached_again_is_the_whole(http, chat, face, cut, n):
    """Every event is sent once, whichever was the last that the client saw."""
    face.core.pause_at = 2
    body = chat("one two three four", n=n, stream=True, stream_options={"include_usage": True})
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        asyncio.get_running_loop().call_later(0.05, face.core.resume.set)
        seen = await read_events(response, cut)
    seen = seen[:cut]
    position = {"Last-Event-ID": seen[-1].event_id} if seen[-1].event_id else {}
    if seen[-1].data == "[DONE]":
        return
    rest = await http.get("/v1/generations/chatcmpl-g0/events?include_usage=true", headers=position)
    assert rest.status_code == 200
    events = seen + parse(rest.text)
    assert contents(events) == dict.fromkeys(range(n), "one two three four")
    chunks = [event for event in events if event.data != "[DONE]" and event.body["choices"]]
    for choice in range(n):
        own = [event.choice for event in chunks if event.choice["index"] == choice]
        assert [c["delta"].get("role") for c in own].count("assistant") == 1
        assert [c["finish_reason"] for c in own].count("stop") == 1
    assert events[-1].data == "[DONE]"
    assert events[-2].body["usage"]["completion_tokens"] == 4 * n


async def test_attaching_without_a_position_replays_from_the_beginning(http, chat):
    first = await ask(http, chat())
    again = parse((await http.get("/v1/generations/chatcmpl-g0/events")).text)
    assert contents(again) == contents(first) == {0: "one two three"}


async def test_attaching_to_a_completion_continues_in_its_own_shape(http):
    body = {"model": "echo", "prompt": "a b c", "stream": True}
    response_id = parse((await http.post("/v1/completions", json=body)).text)[0].body["id"]
    rest = parse((await http.get(f"/v1/generations/{response_id}/events", headers={"Last-Event-ID": "0:1"})).text)
    assert "".join(event.choice["text"] for event in rest[:-1]) == "b c"
    assert {event.body["object"] for event in rest[:-1]} == {"text_completion"}


async def test_attaching_to_what_ended_completely_gives_only_the_end(http, chat):
    last = (await ask(http, chat()))[-2]
    rest = await http.get("/v1/generations/g0/events", headers={"Last-Event-ID": last.event_id})
    assert rest.text == "data: [DONE]\n\n"


async def test_a_stream_that_is_sent_again_with_its_last_event_id_goes_on(http, chat, face):
    """No second generation: the same id, creation time and options, and each token once."""
    face.core.pause_at = 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat("one two three four", stream=True, stream_options=options)
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        seen = await read_events(response, 2)
    face.core.resume.set()
    again = chat("whatever the body says now", stream=True)
    rest = await http.post("/v1/chat/completions", json=again, headers={"Last-Event-ID": seen[-1].event_id})
    events = seen + parse(rest.text)
    assert contents(events) == {0: "one two three four"}
    assert len(face.core.requests) == 1
    assert {(event.body["id"], event.body["created"]) for event in events[:-1]} == {("chatcmpl-g0", 1_700_000_000)}
    counts = [event.body["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 4)
    assert events[-2].body["choices"] == []


async def test_an_id_of_an_earlier_version_names_no_generation_and_starts_one(http, chat, face):
    again = await http.post("/v1/chat/completions", json=chat(stream=True), headers={"Last-Event-ID": "0:1"})
    assert contents(parse(again.text)) == {0: "one two three"}
    assert len(face.core.requests) == 1


@pytest.mark.parametrize("position", ["g0:0:4", "g0:1:0", "g0:x", "0:4", "g1:0:1"])
async def test_a_position_that_the_generation_does_not_have_is_refused(http, chat, position):
    await ask(http, chat())
    await ask(http, chat())
    for answer in (
        await http.get("/v1/generations/chatcmpl-g0/events", headers={"Last-Event-ID": position}),
        await http.post("/v1/chat/completions", json=chat(stream=True), headers={"Last-Event-ID": position}),
    ):
        if position in ("0:4", "g1:0:1") and answer.request.method == "POST":
            assert answer.status_code == 200
        else:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_completion_does_not_go_on_as_a_chat(http, chat):
    await http.post("/v1/completions", json={"model": "echo", "prompt": "a b c", "stream": True})
    answer = await http.post("/v1/chat/completions", json=chat(stream=True), headers={"Last-Event-ID": "g0:0:1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_generation_is_cancelled_by_its_id(http, chat, face):
    face.core.pause_at = 1
    async with http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        deleted = await http.delete("/v1/generations/chatcmpl-g0")
        events = await read_events(response)
    assert (deleted.status_code, deleted.json()["status"]) == (200, "cancelled")
    assert face.core.cancelled == ["g0"]
    assert events[-2].choice["finish_reason"] == "cancelled"
    again = await http.delete("/v1/generations/chatcmpl-g0")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "generation_not_found")


async def test_attaching_to_nothing_is_not_found(http):
    response = await http.get("/v1/generations/chatcmpl-nothing/events")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "generation_not_found")


@pytest.mark.parametrize(
    "position", ["x", "0", "0:", "0:-1", "16:1", "0:1,0:2", "0:1,", ",".join(["0:1"] * 40), "0:" + "9" * 30]
)
async def test_a_bad_position_is_refused(http, chat, position):
    await ask(http, chat())
    response = await http.get("/v1/generations/chatcmpl-g0/events", headers={"Last-Event-ID": position})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize("text", ["", "0:0", "0:12,1:9.", "15:999999999."])
def test_a_position_is_written_as_it_was_read(text):
    assert str(Cursor.parse(text)) == text


def test_tokens_whose_text_is_not_certain_yet_move_the_position_but_send_nothing():
    writer = ChunkWriter(Started("g", "m", "n", 1), AnswerForm(ChatDialect()), Cursor())
    assert writer.write(Delta(0, 0, (Token(1, "a"),), "n")).count(b"\n\n") == 2
    assert writer.write(Delta(0, 1, (Token(2, ""), Token(3, "")), "n")) == b""
    (event,) = parse(writer.write(Delta(0, 3, (Token(4, "\u00e4"),), "n")).decode())
    assert (event.event_id, event.choice["delta"]) == ("g:0:4", {"content": "\u00e4"})


class TestAReaderThatTakesNothing:
    @pytest.fixture
    def limits(self):
        return HttpLimits(max_body_bytes=16 * 2**20, write_timeout_s=0.3)

    async def test_is_dropped_and_its_generation_detached(self, face, chat, eventually):
        """Far more than the socket's buffers hold, and a client that never reads."""
        text = " ".join(["x" * 1000] * 8000)
        body = json.dumps(chat(text, stream=True)).encode()
        host, port = face.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        await eventually(lambda: face.core.readers == 1, "the stream is open")
        await eventually(lambda: face.core.readers == 0, "the reader was dropped")
        assert face.core.cancelled == []
        await eventually(lambda: face.requests_with(499) == 1, "counted as a client that went away")
        writer.transport.abort()


async def test_hundred_streams_at_once_are_each_their_own(face, chat):
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=face.url, timeout=60, limits=limits, trust_env=False) as http:
        answers = await asyncio.gather(*(ask(http, chat(f"stream number {i}")) for i in range(100)))
    assert [contents(events)[0] for events in answers] == [f"stream number {i}" for i in range(100)]


class TestAStreamThatIsSilent:
    @pytest.fixture
    def limits(self):
        return HttpLimits(max_silence_s=0.2)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
    async def test_has_comments_between_its_events_and_clients_skip_them(self, http, face, chat, path):
        face.core.pause_at = 1
        body = {"/v1/responses": {"input": "one two"}, "/v1/completions": {"prompt": "one two"}}.get(path) or chat("one two")
        comments, events = 0, []
        async with http.stream("POST", path, json={"model": "echo", **body, "stream": True}) as stream:
            async for line in stream.aiter_lines():
                comments += line.startswith(":")
                events += [line] if line.startswith("data: ") else []
                if comments == 3:
                    face.core.resume.set()
        assert comments >= 3
        assert "two" in "".join(events)

    async def test_is_read_by_the_official_client(self, client, face):
        face.core.pause_at = 1
        stream = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "one two"}], stream=True
        )
        asyncio.get_running_loop().call_later(0.7, face.core.resume.set)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two"


class TestAStreamThatBeginsLate:
    @pytest.fixture
    def limits(self):
        return HttpLimits(max_silence_s=0.1, max_opening_s=0.2)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
    async def test_has_headers_and_comments_before_its_first_event(self, http, face, chat, path):
        face.core.pause_at = 0
        body = chat("one two", stream=True) if "chat" in path else {"model": "echo", "input": "one two", "stream": True}
        comments, text = 0, ""
        async with http.stream("POST", path, json=body) as stream:
            assert stream.status_code == 200
            async for line in stream.aiter_lines():
                comments += line.startswith(":")
                text += line
                if comments == 3:
                    face.core.resume.set()
        assert comments >= 3
        assert "two" in text

    @pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", "event: error"), ("/v1/responses", "event: error")])
    async def test_tells_an_error_as_an_event(self, http, face, chat, path, kind):
        face.core.pause_at = face.core.fail_at = 0
        asyncio.get_running_loop().call_later(0.5, face.core.resume.set)
        body = chat("one", stream=True) if "chat" in path else {"model": "echo", "input": "one", "stream": True}
        answer = await http.post(path, json=body)
        assert (answer.status_code, kind in answer.text, "the script says so" in answer.text) == (200, True, True)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
    async def test_names_the_clients_own_field_in_it(self, http, face, chat, path):
        own = {"guided_regex": "a"} if "chat" in path else {"text": {"format": {"type": "json_object"}}}
        param = "guided_regex" if "chat" in path else "text.format"
        face.core.pause_at = face.core.fail_at = 0
        face.core.error = errors.invalid("sampling.constraint.regex", "is not supported")
        asyncio.get_running_loop().call_later(0.5, face.core.resume.set)
        body = chat("one", stream=True) if "chat" in path else {"model": "echo", "input": "one", "stream": True}
        answer = await http.post(path, json=body | own)
        assert (answer.status_code, f"{param}: is not supported" in answer.text) == (200, True), answer.text

    async def test_is_cancelled_with_its_client(self, http, face, chat, eventually):
        face.core.pause_at = 0
        async with http.stream("POST", "/v1/chat/completions", json=chat("one", stream=True)) as stream:
            assert stream.status_code == 200
        await eventually(lambda: face.core.cancelled == ["g0"], "the generation was cancelled")


def test_each_part_of_an_answer_names_its_node_once_where_a_client_asks_for_it():
    started = Started("g0", "demo", "node-0", 1)
    plain, showing = (ChunkWriter(started, AnswerForm(ChatDialect()), Cursor(), show_nodes=shown) for shown in (False, True))
    texts = ("one", " two", "", " three", " four")
    nodes = ("node-0", "node-0", "node-1", "node-1", "node-1")
    deltas = [Delta(0, at, [Token(at, text)], node) for at, (text, node) in enumerate(zip(texts, nodes, strict=True))]
    events = parse("".join(showing.write(event).decode() for event in deltas))
    assert [event.body.get("node") for event in events] == ["node-0", None, None, "node-1", None]
    without = [{key: value for key, value in event.body.items() if key != "node"} for event in events]
    assert without == [event.body for event in parse("".join(plain.write(event).decode() for event in deltas))]


@pytest.mark.parametrize("asked", ["true", "false", None])
async def test_nodes_are_in_a_stream_whose_request_asks_for_them(http, chat, asked):
    headers = {} if asked is None else {"x-ryzanstein-show-nodes": asked}
    answer = await http.post("/v1/chat/completions", json=chat("one two", stream=True), headers=headers)
    named = [event.body["node"] for event in parse(answer.text) if event.data != "[DONE]" and "node" in event.body]
    assert named == (["node-1"] if asked == "true" else [])
