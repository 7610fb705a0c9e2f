"""Bodies that once stopped a router: each gets a typed answer, and nobody else notices.

On a busy machine a loop is late by itself, so what is bounded is the processor time that it takes at a stretch. Processor time,
too, is longer where cores are shared: the bound is twice the one that docs/operate/secure.md names.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import pytest
from tests.hostile.corpus import BODIES, BOUND, CHAT, COMPLETIONS, HostileBody
from tests.hostile.measure import http_row
from tests.hostile.victim import Victim

_BUSY_S = 0.1
_STREAMS = 8
_TOKENS = 600


def test_every_body_is_within_the_bound_on_bodies() -> None:
    assert max(len(body.content) for body in BODIES) <= BOUND


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_a_hostile_body_gets_a_typed_answer(router: Victim, body: HostileBody) -> None:
    reply = router.post(body.path, body.content)
    assert reply.status_code == body.status, reply.text[:512]
    if body.status != 200:
        error = reply.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", body.param)
        assert error["code"] in ("invalid_json", "invalid_argument")
        assert 0 < len(error["message"]) <= 512


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_a_hostile_body_does_not_hold_the_loop(router: Victim, body: HostileBody) -> None:
    assert min(lag.busy_s for lag in http_row(router, body).lags) < _BUSY_S


def _complete_at_once(router: Victim, body: HostileBody, count: int) -> list[bytes]:
    """Requests of which all but the last byte came before; their status lines."""
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    data = head % (body.path.encode(), len(body.content)) + body.content
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", router.ports["http_port"])
        sockets = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(count)]
        for one in sockets:
            one.sendall(data[:-1])
        time.sleep(1)
        router.lag()
        for one in sockets:
            one.sendall(data[-1:])
        return [one.recv(12) for one in sockets]


def test_many_large_bodies_at_once_hold_the_loop_no_longer_than_one(router: Victim) -> None:
    (body,) = (body for body in BODIES if body.name == "4 MB of quotation marks")
    busy_s = []
    for _ in range(3):
        assert _complete_at_once(router, body, 24) == [b"HTTP/1.1 400"] * 24
        busy_s.append(router.lag().busy_s)
    assert min(busy_s) < _BUSY_S


def test_a_body_of_a_byte_too_many_is_refused(router: Victim) -> None:
    assert router.post(CHAT, b" " * (BOUND + 1)).json()["error"]["code"] == "body_too_large"


def test_memory_descriptors_and_the_log_are_as_before(router: Victim) -> None:
    for body in BODIES:
        router.post(body.path, body.content)
    memory, descriptors = router.resident_bytes, router.num_descriptors
    for body in BODIES * 3:
        router.post(body.path, body.content)
    assert router.resident_bytes - memory < 64 * 2**20
    assert router.num_descriptors <= descriptors + 2
    assert router.errors == []


_GOOD = (
    b'{"model":"scripted","max_tokens": 2,"messages":[{"role":"user","content":"0.001"}]}',
    b'{"model":"scripted","max_tokens": 2,"prompt":[1,2,3],"stop":["a"],"logit_bias":{"5":1.5},"seed":5}',
)
_PARTS = (
    b"null",
    b"[]",
    b'"\\ud800"',
    b"1e999",
    b"-1",
    b"9" * 400,
    b"NaN",
    b"[[[",
    b"}",
    b'"',
    b"\\",
    b"\0",
    b"\xff",
    b",",
    b"1.5",
)


def _torn(rng: Random, data: bytes) -> bytes:
    """With a few parts of it replaced."""
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(data) + 1)
        part = rng.choice(_PARTS) if rng.random() < 0.7 else rng.randbytes(rng.randint(1, 5))
        data = data[:begin] + part + data[begin + rng.randint(0, 6) :]
    return data


def _sent(port: int, data: bytes) -> bytes:
    """What is answered to bytes that need not be HTTP."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65_536):
            answer += part
    return answer


@pytest.mark.parametrize("seed", range(3))
def test_torn_requests_cost_no_process_no_traceback_and_no_descriptor(router: Victim, seed: int) -> None:
    rng = Random(seed)
    descriptors = router.num_descriptors
    for _ in range(200):
        body = _torn(rng, rng.choice(_GOOD))
        assert router.post(rng.choice((CHAT, COMPLETIONS)), body).status_code < 500, body
        body = rng.choice(_GOOD)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
        request = _torn(rng, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b" 50" not in _sent(router.ports["http_port"], request)[:16], request
        _sent(
            router.ports["metrics_port"],
            _torn(rng, b"GET /metrics?name[]=a HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n"),
        )
    assert router.process.poll() is None
    assert router.num_descriptors <= descriptors + 5
    assert router.errors == []


def _stream(router: Victim, begun: threading.Semaphore) -> list[str]:
    """The pieces of one answer at a token every 10 ms, and what ended it."""
    body = {"model": "scripted", "stream": True, "max_tokens": _TOKENS, "messages": [{"role": "user", "content": "0.01"}]}
    pieces = []
    with httpx.stream("POST", router.url + CHAT, json=body, timeout=60, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
                if len(pieces) == 1:
                    begun.release()
            elif line.startswith(("data:", "event:")):
                pieces.append(line)
    return pieces


def test_eight_streams_beside_hostile_bodies_are_whole(router: Victim) -> None:
    lost = "ryzanstein_router_link_losses_total"
    losses, begun = router.metric(lost), threading.Semaphore(0)
    with ThreadPoolExecutor(_STREAMS) as pool:
        streams = [pool.submit(_stream, router, begun) for _ in range(_STREAMS)]
        for _ in streams:
            assert begun.acquire(timeout=30)
        for body in BODIES:
            assert router.post(body.path, body.content).status_code == body.status
        for stream in streams:
            *words, end = stream.result(timeout=100)
            assert ("".join(words), end) == (" word" * _TOKENS, "data: [DONE]")
    assert router.metric(lost) == losses
