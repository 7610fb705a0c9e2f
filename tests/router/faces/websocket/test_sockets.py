"""A socket's life: who may open one, what it may send, and with which code it ends."""

from __future__ import annotations

import asyncio
import json
import os
import struct

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Opcode

from ryzanstein.router.faces.websocket.limits import SocketLimits


def frame(opcode: int, data: bytes = b"", *, fin: bool = True) -> bytes:
    """A client's frame, masked, as RFC 6455 (5.2) has it."""
    size = len(data)
    head = bytes([(0x80 if fin else 0) | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    else:
        head += bytes([0x80 | 126]) + struct.pack("!H", size) if size < 65536 else bytes([0xFF]) + struct.pack("!Q", size)
    mask = os.urandom(4)
    return head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))


@pytest.fixture
def send_raw(client):
    return client.socket.transport.write


class TestTheHandshake:
    async def test_the_subprotocol_is_chosen_from_those_that_the_client_offers(self, face):
        async with face.connect(subprotocols=["other", "ryzanstein.v1"]) as socket:
            assert socket.subprotocol == "ryzanstein.v1"
            assert "Sec-WebSocket-Extensions" not in socket.response.headers

    @pytest.mark.parametrize("subprotocols", [["ryzanstein.v2"], None])
    async def test_another_subprotocol_is_refused_by_name(self, face, subprotocols):
        with pytest.raises(InvalidStatus) as refused:
            await face.connect(subprotocols=subprotocols)
        error = json.loads(refused.value.response.body)["error"]
        assert refused.value.response.status_code == 400
        assert (error["code"], error["param"]) == ("invalid_handshake", "Sec-WebSocket-Protocol")

    async def test_a_foreign_web_page_may_not_connect(self, face):
        with pytest.raises(InvalidStatus) as refused:
            await face.connect(origin="https://evil.example")
        assert refused.value.response.status_code == 403
        assert json.loads(refused.value.response.body)["error"]["code"] == "origin_not_allowed"
        assert face.telemetry.http_refused.labels("origin")._value.get() == 1

    @pytest.mark.parametrize(
        ("name", "value"),
        [("Sec-WebSocket-Key", "short"), ("Sec-WebSocket-Version", "8"), ("Sec-WebSocket-Key", None)],
    )
    async def test_a_wrong_handshake_names_the_header(self, face, name, value):
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": "ryzanstein.v1",
            name: value,
        }
        async with httpx.AsyncClient(trust_env=False) as http:
            given = {name: value for name, value in headers.items() if value is not None}
            answer = await http.get(face.url.replace("ws", "http", 1), headers=given)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name

    async def test_another_path_or_method_is_plain_http(self, face):
        async with httpx.AsyncClient(trust_env=False) as http:
            upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
            base = face.url.replace("ws", "http", 1)
            assert (await http.get(base + "/other", headers=upgrade)).status_code == 404
            assert (await http.get(base)).status_code == 404
            assert (await http.get(base.replace("/v1/ws", "/healthz"), headers=upgrade)).json() == {"status": "ok"}

    async def test_frames_that_come_with_the_handshake_are_read(self, face):
        reader, writer = await asyncio.open_connection("127.0.0.1", face.server.port)
        head = (
            b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: ryzanstein.v1\r\n\r\n"
        )
        writer.write(head + frame(Opcode.TEXT, b'{"type":"cancel","generation":"x"}'))
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer  # the accept of RFC 6455's own example
        assert b"generation_not_found" in await asyncio.wait_for(reader.readuntil(b"}"), 10)
        writer.transport.abort()


class TestOrigins:
    @pytest.fixture
    def limits(self):
        return SocketLimits(origins=frozenset({"https://good.example"}))

    async def test_a_listed_origin_may_connect(self, face):
        async with face.connect(origin="https://good.example") as socket:
            assert socket.subprotocol == "ryzanstein.v1"


class TestMessagesThatAreNoRequest:
    @pytest.mark.parametrize(
        ("message", "field", "code"),
        [
            ("{", None, "invalid_json"),
            ('{"type":"submit","id":"a","url":"/v1/x","body":' + "[" * 20_000, None, "invalid_json"),
            ("[]", None, "invalid_body"),
            ("5", None, "invalid_body"),
            ("{}", "type", "invalid_argument"),
            ('{"type":"dance"}', "type", "invalid_argument"),
            ('{"type":"submit","id":"a","body":{}}', "url", "invalid_argument"),
            ('{"type":"submit","id":"a","url":"/v1/x","body":{},"colour":1}', "colour", "invalid_argument"),
            ('{"type":"submit","id":"","url":"/v1/x","body":{}}', "id", "invalid_argument"),
            ('{"type":"submit","id":"a","url":"/v1/x","body":{},"credit":-1}', "credit", "invalid_argument"),
            ('{"type":"attach","id":"a","generation":"g","from_index":{"x":1}}', "from_index", "invalid_argument"),
            ('{"type":"credit","id":"a","chunks":0}', "chunks", "invalid_argument"),
        ],
    )
    async def test_each_gets_a_typed_error_with_the_field(self, client, message, field, code):
        await client.socket.send(message)
        failed = await client.receive()
        assert (failed["type"], failed["status"]) == ("error", 400)
        assert (failed["error"]["param"], failed["error"]["code"]) == (field, code)
        await client.submit("b")
        await client.until("done", "b")

    async def test_the_id_is_repeated_where_it_can_be_read(self, client):
        await client.socket.send('{"type":"submit","id":"a","body":{}}')
        assert (await client.receive())["id"] == "a"

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"url": "/v1/models"}, "url"),
            ({"headers": {"X-Tenant-Id": "other"}}, "headers.X-Tenant-Id"),
            ({"headers": {"X-Run-Detached": "maybe"}}, "x-run-detached"),
            ({"headers": {"X-Request-Timeout-Ms": "-5"}}, "X-Request-Timeout-Ms"),
            ({"headers": {"X-Session-Id": "t\u00e9"}}, "headers"),
            ({"body": {"stream": False}}, "stream"),
            ({"body": {"messages": []}}, "messages"),
            ({"body": {"messages": "x"}}, "messages"),
            ({"body": {"nonsense": 1}}, "nonsense"),
        ],
    )
    async def test_a_submit_that_is_wrong_names_the_field(self, client, fields, field):
        await client.submit("a", **fields)
        failed = await client.receive()
        assert (failed["type"], failed["id"], failed["status"], failed["error"]["param"]) == ("error", "a", 400, field)

    @pytest.mark.parametrize(("body", "field"), [({"prompt": ["a", "b"]}, "prompt"), ({"prompt": "a", "echo": True}, "echo")])
    async def test_a_completion_is_one_stream_or_refused(self, client, body, field):
        await client.send("submit", id="a", url="/v1/completions", body=body)
        assert (await client.receive())["error"]["param"] == field

    async def test_whoever_sends_nothing_else_is_closed(self, client, face):
        for _ in range(40):
            await client.socket.send("nonsense")
        with pytest.raises(ConnectionClosed):
            await client.quiet()
        assert (await client.closed())[0] == 1008
        assert face.value("websocket_malformed_total", reason="malformed") == 33

    async def test_a_binary_message_closes(self, client):
        await client.socket.send(b"{}")
        assert (await client.closed())[0] == 1003

    async def test_a_message_that_is_not_utf_8_closes(self, client, send_raw):
        send_raw(frame(Opcode.TEXT, b"\xff\xfe"))
        assert (await client.closed())[0] == 1007

    async def test_what_is_no_frame_closes(self, client, send_raw):
        send_raw(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert (await client.closed())[0] == 1002

    async def test_a_compressed_frame_closes_because_compression_was_not_agreed(self, client, send_raw):
        send_raw(bytes([0xC1]) + frame(Opcode.TEXT, b"bomb")[1:])
        assert (await client.closed())[0] == 1002


class TestBounds:
    @pytest.fixture
    def limits(self):
        return SocketLimits(max_streams=2, max_message_bytes=65_536, max_fragments=64, max_sockets=2)

    async def test_a_message_too_large_closes_and_says_so(self, client):
        await client.socket.send("x" * 65_537)
        assert (await client.closed())[0] == 1009

    async def test_a_message_in_fragments_is_whole(self, client, send_raw):
        message = b'{"type":"cancel","generation":"nobody"}'
        parts = [message[i : i + 1] for i in range(len(message))]
        send_raw(frame(Opcode.TEXT, parts[0], fin=False))
        for part in parts[1:-1]:
            send_raw(frame(Opcode.CONT, part, fin=False) + frame(Opcode.PING))
        send_raw(frame(Opcode.CONT, parts[-1]))
        assert (await client.receive())["generation"] == "nobody"

    async def test_a_message_in_too_many_fragments_closes(self, client, send_raw):
        send_raw(frame(Opcode.TEXT, b"x", fin=False) + frame(Opcode.CONT, b"", fin=False) * 64)
        assert (await client.closed())[0] == 1008

    async def test_more_streams_than_the_bound_are_refused_each(self, client, face):
        face.core.pause_at = 1
        for name in "abc":
            await client.submit(name)
        refused = await client.until("error")
        assert (refused["id"], refused["status"], refused["error"]["code"]) == ("c", 429, "queue_full")
        face.core.resume.set()
        for _ in "ab":
            await client.until("done")
        await client.submit("c")
        await client.until("done", "c")

    async def test_an_id_in_use_is_refused_and_its_stream_goes_on(self, client, face):
        face.core.pause_at = 1
        await client.submit("a")
        await client.until("chunk")
        await client.submit("a")
        refused = await client.until("error")
        assert refused["error"]["param"] == "id"
        assert "id" not in refused, "it would end the stream that has the id"
        face.core.resume.set()
        await client.until("done")
        assert client.text("a") == "one two three"

    async def test_more_sockets_than_the_bound_are_refused(self, face, client):
        async with face.connect():
            with pytest.raises(InvalidStatus) as refused:
                await face.connect()
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["Retry-After"] == "1"


class TestTime:
    @pytest.fixture
    def limits(self):
        return SocketLimits(ping_s=0.2, silence_s=1.0, idle_s=1.5, message_timeout_s=0.4)

    async def test_a_socket_without_a_stream_is_closed_after_a_while(self, client):
        assert await client.closed() == (4000, "idle")

    async def test_a_socket_with_a_stream_is_not_idle(self, client, face):
        face.core.pause_at = 1
        await client.submit("a")
        await client.quiet(2.5)
        face.core.resume.set()
        await client.until("done")
        assert client.text("a") == "one two three"

    async def test_a_client_that_answers_no_ping_is_closed(self, face, eventually):
        """Half open: the connection is there, and nobody behind it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", face.server.port)
        writer.write(
            b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: ryzanstein.v1\r\n\r\n"
        )
        rest = await asyncio.wait_for(reader.read(), 20)
        assert rest.count(bytes([0x89, 0])) >= 3, "pings"
        assert struct.pack("!H", 4001) in rest
        await eventually(lambda: face.value("websockets_closed_total", code="4001") == 1, "counted")
        writer.close()

    async def test_a_message_that_does_not_end_is_closed(self, client, send_raw):
        send_raw(frame(Opcode.TEXT, b"{", fin=False))
        assert (await client.closed())[0] == 4008


class TestMessagesInParts:
    @pytest.fixture
    def limits(self):
        return SocketLimits(message_timeout_s=0.4)

    async def test_messages_that_follow_each_other_are_each_in_time(self, client, send_raw):
        """There is always a part of one that has not come, and none takes long."""
        message = frame(Opcode.TEXT, b'{"type":"credit","id":"a","chunks":1}')
        send_raw(message[:10])
        for _ in range(20):
            await asyncio.sleep(0.05)
            send_raw(message[10:] + message[:10])
        send_raw(message[10:])
        await client.submit("a")
        await client.until("done")
        assert client.text("a") == "one two three"


class TestRate:
    @pytest.fixture
    def limits(self):
        return SocketLimits(frames_per_s=200, frame_burst=50)

    async def test_a_flood_of_pings_waits_and_is_answered(self, client, send_raw):
        loop = asyncio.get_running_loop()
        began = loop.time()
        send_raw(frame(Opcode.PING) * 250)
        await asyncio.sleep(0.1)
        await client.submit("a")
        await client.until("done")
        assert loop.time() - began > 0.9


class TestAFlood:
    @pytest.fixture
    def limits(self):
        return SocketLimits(frames_per_s=1000, frame_burst=100, flood_s=0.5)

    async def test_of_frames_that_does_not_end_is_closed(self, client, send_raw):
        send_raw(frame(Opcode.PING) * 10_000)
        assert (await client.closed())[0] == 1008


class TestAClientThatDoesNotRead:
    @pytest.fixture
    def limits(self):
        return SocketLimits(give_up_s=0.5, unread_s=0.1, max_message_bytes=16 * 2**20)

    @pytest.mark.long
    async def test_is_closed_and_its_generation_detached(self, face, eventually):
        text = " ".join(["x" * 1000] * 8000)
        async with face.connect(max_queue=1) as socket:
            body = {"messages": [{"role": "user", "content": text}]}
            await socket.send(json.dumps({"type": "submit", "id": "a", "url": "/v1/chat/completions", "body": body}))
            await eventually(lambda: face.value("websockets_closed_total", code="4002") == 1, "closed")
            assert face.core.readers == 0
            assert face.core.cancelled == []


class TestAStopOfTheRouter:
    async def test_an_open_stream_ends_before_its_socket_and_new_ones_are_refused(self, client, face):
        face.core.pause_at = 1
        await client.submit("a")
        await client.until("chunk")
        stopping = asyncio.create_task(face.server.stop(20))
        drain = await client.until("draining")
        assert drain["retry_after_ms"] > 0
        await client.submit("b")
        refused = await client.until("error")
        assert (refused["id"], refused["status"], refused["error"]["code"]) == ("b", 503, "draining")
        face.core.resume.set()
        await client.until("done", "a")
        assert (await client.closed())[0] == 1012
        await asyncio.wait_for(stopping, 10)

    async def test_what_runs_longer_than_the_grace_is_told_to_attach_elsewhere(self, client, face):
        face.core.pause_at = 1
        await client.submit("a", headers={"X-Cancel-On-Disconnect": "true"})
        await client.until("chunk")
        stopping = asyncio.create_task(face.server.stop(1))
        moved = await client.until("error")
        assert (moved["id"], moved["generation"], moved["error"]["code"]) == ("a", "chatcmpl-g0", "generation_moved")
        assert moved["retry_after_ms"] > 0
        assert (await client.closed())[0] == 1012
        await asyncio.wait_for(stopping, 10)
        assert face.core.cancelled == []

    async def test_a_socket_without_streams_is_closed_at_once(self, client, face):
        await asyncio.wait_for(face.server.stop(20), 10)
        assert (await client.closed())[0] == 1012


async def test_nothing_is_left_of_sockets_that_are_gone(face, client, eventually):
    for _ in range(20):
        async with face.connect() as socket:
            other = type(client)(socket)
            await other.submit("a")
            await other.until("done")
    await client.socket.close()
    await eventually(lambda: face.value("websockets_open") == 0, "all closed")
    state = face.server._server.server_state
    await eventually(lambda: not state.connections and not state.tasks, "no tasks and no connections")
