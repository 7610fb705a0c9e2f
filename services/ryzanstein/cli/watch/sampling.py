"""Asks a cluster again and again, over connections that stay open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import grpc

from ryzanstein.auth.peers.peer import Expect
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.look import look
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.survey.views import ClusterStatus

PATIENCE_S = 2.0
"""How long a service may take to answer."""
_HELD_UP_S = 0.5
"""How long a sample waits for a service: meanwhile nothing is seen of the others."""
_UNUSED_S = 60.0
T = TypeVar("T")


class KeptChannels:
    """Channels that outlive their use: who leaves `async with` leaves them open.

    A cluster of a hundred nodes would else take a hundred new connections, and with TLS handshakes, each second.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._channels: dict[object, tuple[_KeptChannel, float]] = {}

    def channel(self, key: object, opened: Callable[[], grpc.aio.Channel]) -> grpc.aio.Channel:
        """Returns the channel of a key, opened at its first use."""
        channel = self._channels[key][0] if key in self._channels else _KeptChannel(opened())
        self._channels[key] = (channel, self._now())
        return cast(grpc.aio.Channel, channel)

    async def close_unused(self) -> None:
        """Closes those that nobody has used lately: their service is gone, or its certificates were renewed."""
        await self._close([key for key, (_, used) in self._channels.items() if self._now() - used > _UNUSED_S])

    async def close(self) -> None:
        await self._close(list(self._channels))

    async def _close(self, keys: list[object]) -> None:
        for key in keys:
            channel, _ = self._channels.pop(key)
            await channel.opened.close()


class _KeptChannel:
    """A channel that is not closed by who uses it, and whose calls do not wait longer than PATIENCE_S."""

    def __init__(self, opened: grpc.aio.Channel) -> None:
        self.opened = opened

    async def __aenter__(self) -> _KeptChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def unary_unary(self, *method: Any, **more: Any) -> Callable[..., Any]:
        call = self.opened.unary_unary(*method, **more)

        def impatient(request: Any, *, timeout: float | None = None, **options: Any) -> Any:
            return call(request, timeout=PATIENCE_S if timeout is None else min(timeout, PATIENCE_S), **options)

        return impatient

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)


class KeptDialer(Dialer):
    """Dials as another one does, each service once."""

    def __init__(self, dialer: Dialer, channels: KeptChannels) -> None:
        self._dialer, self._channels = dialer, channels

    @property
    def secure(self) -> bool:
        return self._dialer.secure

    def open(self, address: str, expect: Expect, *, retries: bool = True) -> grpc.aio.Channel:
        """Returns a channel to host:port that stays open."""
        key = (address, expect, retries, self._dialer.version)
        return self._channels.channel(key, lambda: self._dialer.open(address, expect, retries=retries))


@dataclass(frozen=True, slots=True)
class KeptRouter(KeyedRouter):
    """A router that is reached over one connection."""

    channels: KeptChannels = field(default_factory=KeptChannels, repr=False, compare=False)

    def open(self) -> grpc.aio.Channel:
        """Returns a channel that stays open."""
        return self.channels.channel(self.address, KeyedRouter(self.address, self.key, self.trust).open)


class SourceQuestions:
    """Asks each service on its own.

    A sample does not wait for one that is silent: its last answer stands in, until the question fails.
    """

    def __init__(self, held_up_s: float) -> None:
        self._held_up_s = held_up_s
        self._running: dict[object, asyncio.Task[Any]] = {}
        self._last: dict[object, asyncio.Task[Any]] = {}
        self._asked: set[object] = set()
        self._is_first = True

    async def ask(self, key: tuple[str, ...], question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the answer, or the last one. Raises what the last question ended with. The first sample waits for all."""
        self._asked.add(key)
        if key not in self._running:
            self._running[key] = asyncio.create_task(question())
        task: asyncio.Task[T] = self._running[key]
        await asyncio.wait({task}, timeout=None if self._is_first else self._held_up_s)
        if task.done():
            self._last[key] = self._running.pop(key)
        elif key not in self._last:
            raise RyzansteinError("no answer yet", Code.DEADLINE_EXCEEDED, "")
        last: asyncio.Task[T] = self._last[key]
        return last.result()

    def sampled(self) -> None:
        """A sample is complete: forgets those that nobody asks any more."""
        self._is_first = False
        for key in self._last.keys() - self._asked:
            del self._last[key]
        self._cancel(self._running.keys() - self._asked)
        self._asked.clear()

    async def close(self) -> None:
        """Ends what is still asked."""
        await asyncio.gather(*self._cancel(set(self._running)), return_exceptions=True)

    def _cancel(self, keys: Iterable[object]) -> list[asyncio.Task[Any]]:
        cancelled = [self._running.pop(key) for key in keys]
        for task in cancelled:
            task.cancel()
        return cancelled


class ClusterSampler:
    """Asks one cluster each `interval_s`, or as fast as it answers. While `paused` it asks nothing."""

    def __init__(self, orchestrator: str, router: KeyedRouter, dialer: Dialer, interval_s: float) -> None:
        self.orchestrator, self.router, self.dialer = orchestrator, router, dialer
        self._interval_s = interval_s
        self._channels = KeptChannels()
        self._running = asyncio.Event()
        self._running.set()

    def pause(self, paused: bool) -> None:
        """Stops asking, or goes on."""
        if paused:
            self._running.clear()
        else:
            self._running.set()

    async def samples(self) -> AsyncIterator[ClusterStatus]:
        """Yields what the services say, until the caller stops. Services that do not answer are its errors."""
        router = KeptRouter(self.router.address, self.router.key, self.router.trust, self._channels)
        dialer = KeptDialer(self.dialer, self._channels)
        questions = SourceQuestions(min(_HELD_UP_S, self._interval_s / 2))
        try:
            while True:
                began = time.monotonic()
                await self._running.wait()
                status = await look(self.orchestrator, router, dialer, questions.ask)
                questions.sampled()
                # In one order: who fails first changes from sample to sample.
                yield replace(status, errors=dict(sorted(status.errors.items())))
                await self._channels.close_unused()
                await asyncio.sleep(max(0.0, began + self._interval_s - time.monotonic()))
        finally:
            await questions.close()
            await self._channels.close()
