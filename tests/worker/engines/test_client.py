"""The client against a server on a real socket that does everything that servers do wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.public_certificates import PublicAuthority
from tests.worker.engines.stub_server import EVENTS, Exchange, Stub, stub_server

from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineBusy, EngineProtocolError, EngineRefused, EngineUnreachable

Connect = Callable[..., EngineClient]


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with stub_server() as stub:
        yield stub


@pytest.fixture
async def connect(stub: Stub) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        def make(key: str = "", address: str = "", **more: Any) -> EngineClient:
            client = EngineClient(EngineAddress.parse(address or stub.address), key, **{"silence_s": 20.0, **more})
            stack.push_async_callback(client.close)
            return client

        yield make


async def read(client: EngineClient, path: str = "/stream") -> list[bytes]:
    return [event async for event in client.stream(path, {"a": 1})]


async def test_events_come_as_they_are_sent(stub: Stub, connect: Connect) -> None:
    proceed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.send(EVENTS)
        await exchange.chunk(b"data: one\n\nda")
        await proceed.wait()
        await exchange.chunk(b"ta: two\n\n")
        await exchange.send(b"0\r\n\r\n")

    stub.behaviours["/stream"] = behave
    async with aclosing(connect().stream("/stream", {"a": 1})) as events:
        assert await anext(events) == b"one"
        proceed.set()
        assert [event async for event in events] == [b"two"]
    assert stub.requests[0].body == b'{"a":1}'


async def test_a_request_has_the_key_and_nothing_of_the_environment(
    stub: Stub, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    stub.at("/a", {"x": 1}, headers="Set-Cookie: spy=1\r\n")
    client = connect("key-1", address=stub.address.replace("127.0.0.1", "localhost"))
    assert await client.get("/a") == await client.get("/a") == {"x": 1}
    assert stub.connections == 1, "the connection is used again"
    for request in stub.requests:
        assert request.headers["authorization"] == "Bearer key-1"
        assert request.headers["accept-encoding"] == "identity"
        assert "cookie" not in request.headers
    assert "key-1" not in repr(client)


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown() -> None:
    for key in ("secret\nX: 1", "secret key", "sécret"):
        with pytest.raises(ValueError, match="engine_key_file") as refused:
            EngineClient(EngineAddress.parse("http://localhost:1"), key)
        assert "cret" not in str(refused.value)


@pytest.mark.parametrize("kind", ["unix", "ipv6"])
async def test_a_server_is_reached_by_a_socket_file_and_by_ipv6(kind: str, connect: Connect, tmp_path: Path) -> None:
    place = {"socket": str(tmp_path / "e.sock")} if kind == "unix" else {"host": "::1"}
    async with stub_server(**place) as stub:
        stub.at("/a", {"x": 1})
        assert await connect(address=stub.address).get("/a") == {"x": 1}


async def test_a_base_path_stands_before_all_paths(stub: Stub, connect: Connect) -> None:
    stub.at("/team/engine/a", {"x": 1})
    assert await connect(address=stub.address + "/team/engine").get("/a") == {"x": 1}


async def test_closing_the_iterator_closes_the_connection(stub: Stub, connect: Connect) -> None:
    closed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.events(b"one", end=False)
        await exchange.gone.wait()
        closed.set()

    stub.behaviours["/stream"] = behave
    async with aclosing(connect().stream("/stream", {})) as events:
        await anext(events)
    assert await asyncio.wait_for(closed.wait(), 2)


async def test_a_cancelled_reader_closes_the_connection(stub: Stub, connect: Connect) -> None:
    began, closed = asyncio.Event(), asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        began.set()
        await exchange.gone.wait()
        closed.set()

    stub.behaviours["/stream"] = behave
    task = asyncio.create_task(read(connect()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(closed.wait(), 2)


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        ("400 Bad Request", EngineRefused, "prompt is too long"),
        ("401 Unauthorized", EngineRefused, "answered 401"),
        ("404 Not Found", EngineRefused, "answered 404"),
        ("307 Temporary Redirect", EngineRefused, "answered 307"),
        ("429 Too Many Requests", EngineBusy, "answered 429"),
        ("503 Service Unavailable", EngineBusy, "answered 503"),
        ("500 Internal Server Error", EngineUnreachable, "answered 500"),
        ("502 Bad Gateway", EngineUnreachable, "answered 502"),
    ],
)
async def test_a_status_says_what_follows(stub: Stub, connect: Connect, status: str, kind: type[Exception], text: str) -> None:
    body = {"error": {"message": "the prompt is too long", "code": int(status[:3])}}
    stub.at("/stream", body, status, "Retry-After: 3\r\nLocation: http://127.0.0.1:9/\r\n")
    with pytest.raises(kind, match=text) as raised:
        await read(connect("key-1"))
    assert type(raised.value) is kind
    assert "key-1" not in str(raised.value)
    assert not isinstance(raised.value, EngineRefused) or raised.value.status == int(status[:3])
    assert not isinstance(raised.value, EngineBusy) or raised.value.retry_after_s == 3
    assert len(stub.requests) == 1, "nothing is sent again, and no redirect is followed"


async def test_the_text_of_an_error_is_one_bounded_line(stub: Stub, connect: Connect) -> None:
    stub.at("/stream", b"\x1b[31mbad\r\nthing\xff " + b"x" * 200_000, "400 Bad Request")
    with pytest.raises(EngineRefused) as raised:
        await read(connect())
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 600


async def test_a_server_that_is_not_there_is_unreachable(connect: Connect, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(EngineUnreachable, match="cannot be reached"):
            await read(connect(address=f"http://127.0.0.1:{taken.getsockname()[1]}"))
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        await read(connect(address=f"unix://{tmp_path}/none.sock"))
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        await connect(address="http://no-such-host.invalid:80").get("/a")


async def test_a_server_without_tls_is_unreachable_by_https(stub: Stub, connect: Connect) -> None:
    with pytest.raises(EngineUnreachable):
        await connect(address=stub.address.replace("http", "https"), connect_s=0.5).get("/a")


async def test_a_certificate_must_be_of_an_authority_that_the_system_trusts(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PublicAuthority().write(tmp_path, ("127.0.0.1",))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    async with stub_server(tls=context) as stub:
        stub.at("/a", {"x": 1})
        with pytest.raises(EngineUnreachable, match="certificate verify failed"):
            await connect(address=stub.address).get("/a")
        assert stub.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
        assert await connect(address=stub.address).get("/a") == {"x": 1}


async def test_a_server_that_repeats_the_key_does_not_bring_it_into_a_message(stub: Stub, connect: Connect) -> None:
    stub.at("/a", {"error": {"message": "Incorrect API key: key-1"}}, "401 Unauthorized")
    with pytest.raises(EngineRefused, match=r"Incorrect API key: \*\*\*"):
        await connect("key-1").get("/a")


async def test_a_long_prompt_is_sent_whole(stub: Stub, connect: Connect) -> None:
    stub.streams("/stream", b"one")
    prompt = list(range(100_000, 400_000))
    assert [event async for event in connect().stream("/stream", {"prompt": prompt})] == [b"one"]
    assert json.loads(stub.requests[0].body)["prompt"] == prompt


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Ty", EVENTS, EVENTS + b"a\r\ndata: one\n"])
@pytest.mark.parametrize("close", [True, False])
async def test_a_server_that_hangs_or_breaks_off_is_unreachable(stub: Stub, connect: Connect, sent: bytes, close: bool) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(sent)
        if close:
            exchange.writer.transport.abort() if len(sent) % 2 else exchange.writer.close()
        else:
            await exchange.gone.wait()

    stub.behaviours["/stream"] = behave
    began = time.monotonic()
    with pytest.raises(EngineUnreachable):
        await read(connect(silence_s=0.3))
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(("piece", "pause_s"), [(b"X-Filler: " + b"x" * 1000 + b"\r\n", 0), (b"x", 0.1)], ids=["fast", "slow"])
async def test_a_head_that_never_ends_is_within_a_time(stub: Stub, connect: Connect, piece: bytes, pause_s: float) -> None:
    closed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n")
        try:
            while not exchange.gone.is_set():
                await exchange.send(piece)
                await asyncio.sleep(pause_s)
        finally:
            closed.set()

    stub.behaviours["/stream"] = behave
    with pytest.raises((EngineProtocolError, EngineUnreachable)):
        await asyncio.wait_for(read(connect(silence_s=1.0)), 5)
    assert await asyncio.wait_for(closed.wait(), 5)


async def test_an_endless_line_is_refused_and_the_connection_closed(stub: Stub, connect: Connect) -> None:
    sent = 0
    closed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send(EVENTS)
        try:
            while not exchange.gone.is_set():
                await exchange.chunk(b"x" * 65536)
                sent += 65536
        finally:
            closed.set()

    stub.behaviours["/stream"] = behave
    with pytest.raises(EngineProtocolError, match="more than 1048576 bytes"):
        await read(connect())
    assert await asyncio.wait_for(closed.wait(), 5)
    assert sent < 32 * 1024 * 1024


@pytest.mark.parametrize("answer", [b"HTTP/9 what\r\n\r\n", b"\x00\x01\x02\r\n\r\n", EVENTS + b"zz\r\n"])
async def test_what_is_no_http_is_a_protocol_error(stub: Stub, connect: Connect, answer: bytes) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(answer)
        await exchange.gone.wait()

    stub.behaviours["/stream"] = behave
    with pytest.raises((EngineProtocolError, EngineUnreachable)):
        await read(connect(silence_s=2.0))


async def test_an_answer_that_is_no_stream_is_a_protocol_error(stub: Stub, connect: Connect) -> None:
    stub.at("/stream", {"choices": []}, headers="Content-Type: application/json\r\n")
    with pytest.raises(EngineProtocolError, match="application/json"):
        await read(connect())


async def test_a_compressed_answer_is_not_decompressed(stub: Stub, connect: Connect) -> None:
    stub.at("/a", gzip.compress(b'{"x": 1}'), headers="Content-Encoding: gzip\r\n")
    with pytest.raises(EngineProtocolError, match="no JSON"):
        await connect().get("/a")


async def test_what_is_asked_outside_of_streams_is_bounded(stub: Stub, connect: Connect) -> None:
    stub.at("/a", b'"' + b"x" * (5 * 1024 * 1024) + b'"')
    with pytest.raises(EngineProtocolError, match="more than 4194304 bytes"):
        await connect().get("/a")
    stub.at("/b", b"not json")
    with pytest.raises(EngineProtocolError, match="no JSON"):
        await connect().get("/b")


async def test_a_request_that_meets_a_connection_closed_meanwhile_is_sent_again(stub: Stub, connect: Connect) -> None:
    async def behave(exchange: Exchange) -> None:
        first = len(stub.requests) == 1
        if not first and stub.connections == 1:
            exchange.writer.transport.abort()  # as a server does whose keep-alive has run out
            return
        await exchange.events(b"one")

    stub.behaviours["/stream"] = behave
    client = connect()
    assert await read(client) == [b"one"]
    assert await read(client) == [b"one"]
    assert (stub.connections, len(stub.requests)) == (2, 3)


async def test_a_request_on_a_new_connection_is_never_sent_again(stub: Stub, connect: Connect) -> None:
    async def behave(exchange: Exchange) -> None:
        exchange.writer.transport.abort()

    stub.behaviours["/stream"] = behave
    with pytest.raises(EngineUnreachable):
        await read(connect())
    assert len(stub.requests) == 1


async def test_health_is_the_servers_own_word_within_a_time(stub: Stub, connect: Connect) -> None:
    client = connect()
    stub.at("/health", b"")
    await client.healthy(1)
    stub.at("/health", {"error": {"message": "Loading model", "code": 503}}, "503 Service Unavailable")
    with pytest.raises(EngineBusy, match="Loading model"):
        await client.healthy(1)

    async def hang(exchange: Exchange) -> None:
        await exchange.gone.wait()

    stub.behaviours["/health"] = hang
    began = time.monotonic()
    with pytest.raises(EngineUnreachable, match="in time"):
        await client.healthy(0.2)
    assert time.monotonic() - began < 2


async def test_health_is_heard_while_all_streams_run(stub: Stub, connect: Connect) -> None:
    async def hold(exchange: Exchange) -> None:
        await exchange.events(b"one", end=False)
        await exchange.gone.wait()

    stub.behaviours["/stream"] = hold
    stub.at("/health", b"")
    client = connect(most_streams=2)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            events = await stack.enter_async_context(aclosing(client.stream("/stream", {})))
            assert await anext(events) == b"one"
        await client.healthy(2)
