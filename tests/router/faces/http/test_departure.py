"""Large answers whose clients do not read them: how much memory they take, and for how long. Raw sockets."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from ryzanstein.router.faces.http.gate import HttpLimits

pytestmark = pytest.mark.long

NUM_WORDS = 8000


def asked(chat: Any) -> bytes:
    """A request whose answer, of 8 MB, is more than the buffers of a connection hold."""
    body = json.dumps(chat(" ".join(["x" * 1000] * NUM_WORDS))).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def limits(**more: Any) -> HttpLimits:
    return HttpLimits(max_body_bytes=16 * 2**20, **more)


async def unread(served: Any, chat: Any) -> asyncio.StreamWriter:
    """A connection whose answer has begun and is not read further."""
    reader, writer = await served.connect(asked(chat))
    async with asyncio.timeout(20):
        await reader.readuntil(b"\r\n\r\n")
    return writer


async def whole(served: Any, chat: Any) -> tuple[int, bytes]:
    reader, writer = await served.connect(asked(chat))
    try:
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            return int(head.split()[1]), await reader.readexactly(int(length.split(b":")[1]))
    finally:
        writer.close()


async def test_a_large_answer_arrives_whole(serve: Any, chat: Any) -> None:
    served = await serve(limits=limits())
    code, body = await whole(served, chat)
    assert code == 200
    assert json.loads(body)["choices"][0]["message"]["content"].split() == ["x" * 1000] * NUM_WORDS


async def test_answers_that_nobody_reads_are_bounded_together(serve: Any, chat: Any, eventually: Any) -> None:
    served = await serve(limits=limits(max_leaving_bytes=20 * 10**6))
    first, second = await unread(served, chat), await unread(served, chat)
    code, body = await whole(served, chat)
    assert (code, json.loads(body)["error"]["code"]) == (503, "too_many_answers")
    assert served.refused("memory") == 1
    reader, writer = await served.connect(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"\r\n")
    writer.close()
    for each in (first, second):
        each.transport.abort()
    await eventually(lambda: not served.server._server.server_state.connections, "the connections are gone")
    assert (await whole(served, chat))[0] == 200


async def test_one_answer_is_never_too_large(serve: Any, chat: Any) -> None:
    served = await serve(limits=limits(max_leaving_bytes=1))
    assert (await whole(served, chat))[0] == 200


async def test_a_client_that_reads_nothing_is_cut_off_and_gives_its_room_back(
    serve: Any, chat: Any, eventually: Any, capfd: Any
) -> None:
    served = await serve(limits=limits(max_leaving_bytes=1, write_timeout_s=0.3))
    writer = await unread(served, chat)
    await eventually(lambda: not served.server._server.server_state.connections, "the connection is gone")
    assert (await whole(served, chat))[0] == 200
    assert "Traceback" not in "".join(capfd.readouterr())
    writer.transport.abort()


async def test_a_slow_client_that_goes_on_reading_gets_all(serve: Any, chat: Any) -> None:
    """The whole takes several times as long as a piece may."""
    served = await serve(limits=limits(write_timeout_s=0.5))
    reader, writer = await served.connect(asked(chat))
    async with asyncio.timeout(20):
        await reader.readuntil(b"\r\n\r\n")
        num_bytes, began = 0, time.monotonic()
        while num_bytes < NUM_WORDS * 1000:
            num_bytes += len(await reader.read(2**16))
            await asyncio.sleep(0.015)
    assert time.monotonic() - began > 1.5
    writer.close()
