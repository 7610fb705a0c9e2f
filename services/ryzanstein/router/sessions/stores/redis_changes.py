"""Subscribes to other routers' changes, so that no remembered session is older than the stored one.

Changes are missed while the subscription is broken, so everything remembered is forgotten when it
is restored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from ryzanstein.storage.redis_client import redis_failures

log = structlog.get_logger(__name__)

_PAUSE_S = 0.5
_PING_S = 1.0


class RedisChanges:
    """The subscription. Start `run` as a task.

    `origin` marks this router's own changes. The subscription owns its client: `close` it.
    """

    def __init__(
        self, client: Redis, prefix: str, origin: str, forget: Callable[[str], None], forget_all: Callable[[], None]
    ) -> None:
        self._client = client
        self._channel = f"{prefix}changed"
        self._origin = origin
        self._forget = forget
        self._forget_all = forget_all

    async def run(self) -> None:
        while True:
            try:
                with redis_failures():
                    async with self._client.pubsub() as subscription:
                        await subscription.subscribe(self._channel)
                        await self._listen(subscription)
            except ConnectionError as error:
                log.debug("subscription to session changes failed", error=str(error))
                await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def _listen(self, subscription: PubSub) -> None:
        """Listens until the connection breaks, or a ping is unanswered when the next one is due."""
        answered = True
        while True:
            message = await subscription.get_message(timeout=_PING_S)
            if message is None:
                if not answered:
                    raise ConnectionError("no answer to a ping")
                await subscription.ping()
            answered = message is not None
            if message is not None and message["type"] == "subscribe":
                self._forget_all()
            elif message is not None and message["type"] == "message":
                origin, _, session_id = message["data"].partition(" ")
                if origin != self._origin:
                    self._forget(session_id)
