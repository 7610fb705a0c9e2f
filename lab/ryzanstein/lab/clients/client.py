"""A well-behaved client: it resumes broken streams and retries when told to, for a bounded time.

If a stream breaks after the answer began, or ends with an error that says when to retry
(RetryInfo), the client attaches at the first index that it has not seen, at the same router or the
next. If a request was refused before anything began, the client retries when the refusal says when,
or when there was no connection at all.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.clients.grpc_transport import GrpcTransport
from ryzanstein.lab.clients.http_transport import HttpTransport
from ryzanstein.lab.clients.reading import AnswerReading
from ryzanstein.lab.clients.socket_transport import SocketTransport
from ryzanstein.lab.clients.transport import Request, RouterAddress, Transport

TRANSPORTS: Mapping[str, Callable[[Sequence[RouterAddress]], Transport]] = MappingProxyType(
    {"grpc": GrpcTransport, "sse": HttpTransport, "websocket": SocketTransport}
)
"""By the face of a question."""

PATIENCE_S = 30.0
_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 1.0
_LOST_CONNECTION = (Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL)


class LoadClient:
    """Reads one answer at a time. `go_away` makes it drop its connection and come back later."""

    def __init__(self, transport: Transport, num_routers: int, rng: random.Random, *, waits: bool = True) -> None:
        """Without `waits` a request that is refused before it began is given up."""
        self._transport = transport
        self._waits = waits
        self._num_routers = num_routers
        self._rng = rng
        self._away_s = 0.0

    async def read(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
        """Returns when the answer is complete or given up.

        In the latter case `reading.failure` says why.
        """
        failures, patience_until = 0, None
        while True:
            tokens = reading.num_tokens
            reading.calls += 1
            try:
                await self._transport.follow(request, reading, progress)
                if not reading.complete:
                    raise RyzansteinError("the stream ended before the answer", Code.UNKNOWN, Code.UNKNOWN.name)
                return
            except RyzansteinError as error:
                now = time.monotonic()
                failures = 1 if reading.num_tokens > tokens else failures + 1
                patience_until = now + PATIENCE_S if failures == 1 or patience_until is None else patience_until
                reading.broke(self._note(error))
                if reading.complete and reading.completion_tokens:  # the usage comes last
                    return
                if not self._may_go_on(reading, error) or now > patience_until:
                    if reading.complete:
                        return
                    reading.refused = error.retry_after_s is not None and not reading.generation_id
                    reading.failure = f"{error.code.name} {error.reason}: {error.message}"[:300]
                    return
                await self._wait(error, failures)
            reading.router = (reading.router + 1) % self._num_routers

    async def go_away(self, for_s: float) -> None:
        """Drops the connection now; the reader comes back after `for_s`."""
        self._away_s = for_s
        await self._transport.leave()

    async def close(self) -> None:
        await self._transport.leave()

    def _note(self, error: RyzansteinError) -> str:
        return (
            "disconnected"
            if self._away_s
            else f"{error.code.name} {error.reason}"
            if error.reason != error.code.name
            else error.code.name
        )

    def _may_go_on(self, reading: AnswerReading, error: RyzansteinError) -> bool:
        lost_connection = error.code in _LOST_CONNECTION and error.reason == error.code.name
        if lost_connection or error.retry_after_s is not None:
            return self._waits or lost_connection or bool(reading.generation_id)
        return bool(reading.generation_id) and error.code is Code.NOT_FOUND and self._num_routers > 1 and reading.calls > 1

    async def _wait(self, error: RyzansteinError, failures: int) -> None:
        """Waits as long as the refusal says, or backs off with jitter.

        The back-off starts short, because another router is available at once.
        """
        away_s, self._away_s = self._away_s, 0.0
        backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (failures - 1)) * self._rng.uniform(0.5, 1.0)
        await asyncio.sleep(away_s or error.retry_after_s or backoff_s)
