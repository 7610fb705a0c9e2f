"""What a connection may take: time and bytes for its headers, time for its body, and room among the others. Raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time

import pytest

from ryzanstein.router.faces.http.gate import HttpLimits
from ryzanstein.router.faces.http.serving.connections import ConnectionBounds

pytestmark = pytest.mark.long

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


def status(answer):
    return int(answer.split(b" ", 2)[1])


def code(answer):
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


HALF_SENT = [b"P", b"POST /v1/chat", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]


async def test_three_hundred_half_sent_requests_are_answered_and_closed(serve, eventually):
    served = await serve(ConnectionBounds(header_timeout_s=1), HttpLimits(body_timeout_s=1))
    before = descriptors()
    answers = await asyncio.gather(*(served.say(HALF_SENT[i % len(HALF_SENT)]) for i in range(300)))
    assert {(status(answer), code(answer)) for answer in answers} == {(408, "request_timeout")}
    assert served.refused("timeout") == 300
    await eventually(lambda: descriptors() <= before + 5, "the descriptors are given back")


@pytest.mark.parametrize("part", [b"x", b"\r\n"])
async def test_a_byte_now_and_then_gains_no_time(serve, part):
    served = await serve(ConnectionBounds(header_timeout_s=0.5))
    reader, writer = await served.connect(b"GET / HTTP/1.1\r\nx: " if part == b"x" else b"")
    began = time.monotonic()
    while not reader.at_eof() and time.monotonic() - began < 15:
        writer.write(part)
        await asyncio.sleep(0.1)
        if reader._buffer:
            break
    assert status(await reader.read()) == 408
    writer.close()


async def test_a_connection_that_says_nothing_is_closed_without_an_answer(serve):
    served = await serve(ConnectionBounds(header_timeout_s=0.3))
    assert await served.say(b"") == b""


async def test_the_answer_under_way_is_whole_although_the_next_request_is_never_complete(serve, chat):
    served = await serve(ConnectionBounds(header_timeout_s=0.3))
    served.core.pause_at = 1
    body = json.dumps(chat("one two three", stream=True)).encode()
    reader, writer = await served.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET / HT")
    await asyncio.sleep(1)
    served.core.resume.set()
    async with asyncio.timeout(20):
        assert b"[DONE]" in await reader.read()
    writer.close()


async def test_a_refused_body_does_not_keep_the_connection(serve):
    """Neither where nobody reads it: the rest of it never comes."""
    served = await serve(ConnectionBounds(header_timeout_s=0.5))
    for path in (b"/nowhere", b"/healthz"):
        answer = await served.say(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert status(answer) in (200, 404)


BAD_HEADS = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, 400),
    (b"nonsense\r\n\r\n", 400),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
    (b"CONNECT x:1 HTTP/1.1\r\n\r\n", 400),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 70_000, 413),
]


@pytest.mark.parametrize(("data", "expected"), BAD_HEADS, ids=[repr(data[:20]) for data, _ in BAD_HEADS])
async def test_what_is_no_request_gets_an_openai_error_and_is_counted(serve, data, expected):
    served = await serve()
    answer = await served.say(data)
    assert (status(answer), b"connection: close" in answer) == (expected, True)
    assert code(answer)
    assert served.refused("malformed") + served.refused("too_large") == 1


async def test_a_header_that_never_ends_is_not_collected(serve):
    served = await serve()
    reader, writer = await served.connect(b"GET / HTTP/1.1\r\nx: ")
    for _ in range(100):
        writer.write(b"a" * 65_536)
        try:
            await asyncio.wait_for(writer.drain(), 5)
        except OSError:
            break
        if reader.at_eof() or reader._buffer:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("6 MiB of one header were taken")
    writer.close()
    assert served.refused("too_large") == 1


async def test_a_body_over_the_bound_is_refused_before_it_is_read(serve):
    served = await serve(limits=HttpLimits(max_body_bytes=1000))
    reader, writer = await served.connect(HEAD + b"Content-Length: 1001\r\n\r\n")
    async with asyncio.timeout(20):
        assert status(await reader.readuntil(b"\r\n\r\n")) == 413
    writer.close()
    assert served.refused("too_large") == 1


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"identity, gzip"])
async def test_an_encoded_body_is_refused(serve, encoding):
    served = await serve()
    answer = await served.say(HEAD + b"Connection: close\r\nContent-Encoding: " + encoding + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert (status(answer), code(answer)) == (415, "unsupported_encoding")


class TestRoom:
    async def test_beyond_the_bound_the_newest_is_asked_to_come_back_and_those_inside_are_served(self, serve, eventually, chat):
        served = await serve(ConnectionBounds(max_connections=3))
        served.core.pause_at = 1
        body = json.dumps(chat("one two three", stream=True)).encode()
        streams = [await served.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) for _ in range(3)]
        await eventually(lambda: served.core.readers == 3, "three streams run")
        answer = await served.say(HEALTH)
        assert (status(answer), code(answer), b"retry-after: 1" in answer.lower()) == (503, "too_many_connections", True)
        assert served.refused("connections") == 1
        served.core.resume.set()
        for reader, writer in streams:
            async with asyncio.timeout(20):
                await reader.readuntil(b"data: [DONE]")
            writer.close()
        await eventually(lambda: not served.server._server.server_state.connections, "all are gone")
        assert status(await served.say(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) == 200

    async def test_a_connection_between_two_requests_makes_room(self, serve):
        served = await serve(ConnectionBounds(max_connections=2))
        kept = [await served.connect(HEALTH) for _ in range(2)]
        for reader, _ in kept:
            await reader.readuntil(b'{"status":"ok"}')
        reader, writer = await served.connect(HEALTH)
        assert status(await reader.readuntil(b"\r\n\r\n")) == 200
        assert await kept[0][0].read() == b""
        assert served.refused("connections") == 0
        for _, one in [*kept, (reader, writer)]:
            one.close()

    async def test_a_thousand_too_many_leave_no_descriptors(self, serve, eventually):
        served = await serve(ConnectionBounds(max_connections=1))
        before = descriptors()
        reader, writer = await served.connect(b"GET ")
        for _ in range(10):
            await asyncio.gather(*(served.say(HEALTH) for _ in range(50)), return_exceptions=True)
        await eventually(lambda: descriptors() <= before + 5, "the descriptors are given back")
        assert served.refused("connections") == 500
        writer.close()
        await reader.read()


async def test_requests_in_a_row_over_one_connection_are_answered_in_order_and_are_bounded(serve):
    served = await serve()
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert (await served.say(HEALTH * 9 + last)).count(b"200 OK") == 10
    with contextlib.suppress(ConnectionResetError):  # what it wrote was not read to its end
        assert (await served.say(HEALTH * 5000)).count(b"200 OK") < 100
    assert served.refused("malformed") == 1


class TestARequestBehindAStream:
    """The connection's current request is the queued one, but the stream is what runs."""

    @pytest.fixture
    def stream(self, chat):
        """A request whose generation is cancelled when its client leaves."""
        body = json.dumps(chat("one " * 5_000, stream=True)).encode()
        return HEAD + b"X-Cancel-On-Disconnect: true\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def begin(self, served, data):
        served.core.pause_at = 1
        reader, writer = await served.connect(data)
        async with asyncio.timeout(20):
            await reader.readuntil(b'"one "')
        return reader, writer

    @pytest.mark.parametrize("before", [0, 1])
    @pytest.mark.parametrize("behind", [0, 1, 3])
    async def test_does_not_hide_that_the_client_left(self, serve, stream, eventually, before, behind):
        served = await serve()
        _, writer = await self.begin(served, HEALTH * before + stream)
        writer.write(stream * behind)
        await asyncio.sleep(0.1)
        writer.transport.abort()
        served.core.resume.set()  # nothing is read behind a queued request: writing shows that the client left
        await eventually(lambda: served.core.readers == 0, "the stream has ended")
        assert served.core.cancelled == ["g0"]
        assert len(served.core.requests) == 1, "what was queued does not begin"

    async def test_does_not_hide_that_the_connection_was_refused(self, serve, stream, eventually):
        served = await serve()
        reader, writer = await self.begin(served, stream)
        writer.write(HEALTH + b"nonsense\r\n\r\n")
        async with asyncio.timeout(20):
            assert b"200 OK" not in await reader.read()
        await eventually(lambda: served.core.cancelled == ["g0"], "the stream has ended")
        assert served.refused("malformed") == 1
        writer.close()


async def test_a_client_that_never_reads_keeps_no_connection_and_no_traceback_tells_of_it(serve, chat, eventually, capfd):
    """Its socket's buffers are full, so an orderly end would never come."""
    served = await serve(limits=HttpLimits(max_body_bytes=16 * 2**20, write_timeout_s=0.3))
    body = json.dumps(chat(" ".join(["x" * 1000] * 8000), stream=True)).encode()
    _, writer = await served.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    await eventually(lambda: served.core.readers == 1, "the stream is open")
    await eventually(lambda: not served.server._server.server_state.connections, "the connection is gone")
    assert "Traceback" not in "".join(capfd.readouterr())
    writer.transport.abort()


async def test_bodies_that_are_never_complete_take_bounded_memory_together_and_give_it_back(serve, chat):
    served = await serve(limits=HttpLimits(max_arriving_bytes=100_000, body_timeout_s=1))
    head = HEAD + b"Content-Length: 50000\r\n\r\n"
    waiting = [asyncio.create_task(served.say(head + b" " * 49_999)) for _ in range(2)]
    await asyncio.sleep(0.3)
    reader, writer = await served.connect(head + b" " * 49_999)
    async with asyncio.timeout(20):
        assert status(await reader.readuntil(b"\r\n\r\n")) == 503
    writer.close()
    assert {status(answer) for answer in await asyncio.gather(*waiting)} == {408}
    assert served.refused("memory") == 1
    served.core.pause_at = 0
    body = json.dumps(chat("x" * 49_000)).encode()
    streams = [await served.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) for _ in range(5)]
    async with asyncio.timeout(20):
        while served.core.readers < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert served.refused("memory") == 1, "what is being answered is not being read"
    served.core.resume.set()
    for _, writer in streams:
        writer.close()


async def test_a_client_of_http_1_0_gets_no_chunks(serve, chat):
    served = await serve()
    for stream in (True, False):
        body = json.dumps(chat("one two", stream=stream)).encode()
        head = HEAD.replace(b"1.1", b"1.0").replace(b"Host: x\r\n", b"")
        answer = await served.say(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        fields, _, message = answer.partition(b"\r\n\r\n")
        assert (status(answer), b"transfer-encoding" in fields.lower()) == (200, False)
        assert (b"content-length" in fields.lower()) is not stream
        assert message.startswith(b"id: ") if stream else json.loads(message)
        assert message.endswith(b"data: [DONE]\n\n") if stream else True


@pytest.mark.parametrize("hosts", [b"", b"Host: a\r\nHost: b\r\n", b"Host: a\r\nHost: a\r\n"])
async def test_a_request_has_one_host(serve, hosts):
    served = await serve()
    answer = await served.say(b"GET /healthz HTTP/1.1\r\n" + hosts + b"\r\n")
    assert (status(answer), code(answer)) == (400, "invalid_http")
    assert served.refused("malformed") == 1


@pytest.mark.parametrize(("pause_at", "stream"), [(0, True), (0, False), (1, True)])
async def test_who_waits_when_the_router_stops_is_told_so(serve, chat, eventually, pause_at, stream):
    """Before the first event with a status, behind it in the stream."""
    served = await serve()
    served.core.pause_at = pause_at
    body = json.dumps(chat("one two", stream=stream)).encode()
    reader, writer = await served.connect(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await eventually(lambda: served.core.readers and (not pause_at or reader._buffer), "it waits")
    async with asyncio.timeout(20):
        await served.server.stop(1)
        answer = await reader.read()
    writer.close()
    if pause_at:
        assert b"event: error" in answer
        assert b'"generation_moved"' in answer
    else:
        assert (status(answer), code(answer)) == (503, "draining")
        assert b"retry-after-ms" in answer.lower()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_who_has_only_headers_when_the_router_stops_is_told_so(serve, chat, eventually, path):
    served = await serve(limits=HttpLimits(max_opening_s=0.1))
    served.core.pause_at = 0
    message = chat("one two", stream=True) if "chat" in path else {"model": "echo", "input": "one two", "stream": True}
    body, head = json.dumps(message).encode(), HEAD.replace(b"/v1/chat/completions", path.encode())
    reader, writer = await served.connect(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await eventually(lambda: b"200 OK" in bytes(reader._buffer), "it has its headers")
    async with asyncio.timeout(20):
        await served.server.stop(1)
        answer = await reader.read()
    writer.close()
    assert b"event: error" in answer
    assert b"send the request again" in answer
