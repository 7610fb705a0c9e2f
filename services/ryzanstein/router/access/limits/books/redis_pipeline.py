"""Runs scripts on a Redis server in the order in which they are asked for, all that wait in one round trip.

One pipeline is under way at a time. So a script sees what those before it wrote, and many requests at once
cost little more than one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from ryzanstein.process.background import Background
from ryzanstein.storage.redis_client import redis_failures

ScriptCall = tuple[str, Sequence[str], Sequence[Any]]
"""A script, its keys and its arguments."""
_MOST_AT_ONCE = 256


class ScriptPipeline:
    """A queue of calls of scripts, which must be safe to repeat."""

    def __init__(self, client: Redis, scripts: Sequence[str], background: Background) -> None:
        self._client, self._background = client, background
        self._shas = {script: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest() for script in scripts}
        self._waiting: deque[tuple[Sequence[ScriptCall], asyncio.Future[list[Any]]]] = deque()
        self._busy = False

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Returns the answers to the calls. Raises ConnectionError."""
        done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((calls, done))
        if not self._busy:
            self._busy = True
            self._background.once("limits_pipeline", self._work())
        return await done

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._next()
        finally:
            self._busy = False
            for _, done in self._waiting:  # only if the task is cancelled
                done.cancel()

    async def _next(self) -> None:
        batch: list[tuple[Sequence[ScriptCall], asyncio.Future[list[Any]]]] = []
        num_calls = 0
        while self._waiting and num_calls < _MOST_AT_ONCE:
            batch.append(self._waiting.popleft())
            num_calls += len(batch[-1][0])
        try:
            with redis_failures():
                answers = iter(await self._answers([call for calls, _ in batch for call in calls]))
        except BaseException as error:
            for _, done in batch:
                if not done.done():
                    done.set_exception(error if isinstance(error, Exception) else ConnectionError("the router stops"))
            if not isinstance(error, Exception):
                raise
        else:
            for calls, done in batch:
                own = [next(answers) for _ in calls]
                if not done.done():
                    done.set_result(own)

    async def _answers(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Runs the calls; again, all of them, if the server does not know a script."""
        try:
            return await self._executed(calls)
        except NoScriptError:
            for script in self._shas:
                await self._client.script_load(script)
            return await self._executed(calls)

    async def _executed(self, calls: Sequence[ScriptCall]) -> list[Any]:
        if len(calls) == 1:  # a pipeline takes 0.1 ms more
            ((script, keys, values),) = calls
            return [await self._client.evalsha(self._shas[script], len(keys), *keys, *values)]
        pipeline = self._client.pipeline(transaction=False)
        for script, keys, values in calls:
            pipeline.evalsha(self._shas[script], len(keys), *keys, *values)
        return await pipeline.execute()
