"""Large invalid requests.

A router that parses them before checking bounds blocks its loop and all streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache, partial

import grpc

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.faults.nodes import LINK_DOWN
from ryzanstein.lab.chaos.stage.stage import Stage
from ryzanstein.lab.clients.http_stream import HttpRequest, send
from ryzanstein.rpc.client import open_channel

_POSTED_S = 2.0
_PAUSE_S = 0.01  # a client that is refused at once should not send ten thousand requests a second
_JSON = {"content-type": "application/json"}
_MESSAGES_BYTES = 4 * 2**20
_EMPTY_MESSAGE = b"\x12\x00"  # field 2 of ChatRequest, which is `messages`, of no bytes

_Ask = Callable[[], Coroutine[None, None, None]]


@cache
def _http() -> tuple[HttpRequest, ...]:
    """Returns requests with large bodies.

    These are 800 kB of numbers that are not tokens, 200 kB of invalid messages, and 4 MiB of
    messages.

    The last exceeds the number of messages that is allowed.
    """
    message = b'{"role":"user","content":"hello"}'
    bodies = {
        "/v1/completions": (b'{"model":"demo","prompt":[%s]}' % b",".join([b"1.5"] * 200_000),),
        "/v1/chat/completions": (
            b'{"model":"demo","messages":[%s]}' % b",".join([b"1"] * 100_000),
            b'{"model":"demo","messages":[%s]}' % b",".join([message] * (_MESSAGES_BYTES // (len(message) + 1) - 2)),
        ),
    }
    return tuple(HttpRequest("POST", path, _JSON, body) for path, each in bodies.items() for body in each)


def _grpc() -> bytes:
    """Returns a ChatRequest of 700,000 empty messages, serialized."""
    return _EMPTY_MESSAGE * 700_000


@asynccontextmanager
async def _large_bodies(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Sends large bodies: one client for each kind, which sends again as soon as it is refused."""
    router = stage.router(victim.router)

    async def post(request: HttpRequest) -> None:
        request = replace(request, headers={**request.headers, **router.credential})
        answer = await send(router.http_host, router.http_port, request)
        try:
            await answer.body()
        finally:
            answer.close()

    async with open_channel(router.grpc) as channel:
        chat: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/ryzanstein.v1.InferenceService/Chat")
        message = _grpc()

        async def call() -> None:
            await chat(message, timeout=_POSTED_S, metadata=tuple(router.credential.items()))

        asks: list[_Ask] = [call, *(partial(post, each) for each in _http())]
        stage.strikes_now()
        clients = [asyncio.create_task(_again_and_again(ask)) for ask in asks]
        try:
            yield frozenset()
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _again_and_again(ask: _Ask) -> None:
    """Repeats a request for the duration of the fault, whatever the router answers."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_POSTED_S):
            while True:
                with suppress(OSError, grpc.aio.AioRpcError):
                    await ask()
                await asyncio.sleep(_PAUSE_S)


FAULTS = (
    Fault(
        "large_bodies",
        "large invalid requests over both faces of a router for 2 s",
        _large_bodies,
        (LINK_DOWN,),
        scope=Scope.ALL,
        resumes=Resume.ANY,
        bounds=FaultBounds(rerouted_s=None),
        lasts_s=_POSTED_S,
        unwanted=(LINK_DOWN, Sign("node", "router disconnected"), Sign("router", "generation failed over")),
    ),
)
