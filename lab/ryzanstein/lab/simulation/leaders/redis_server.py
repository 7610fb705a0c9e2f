"""The Redis server that orchestrators share: the lease and the store. It may be away, slow, lose answers, or forget.

The commands are those that `RedisLease` and `RedisStore` send. Their scripts are known by their text, and done here
in Python; a test compares them with a real server. A command may arrive after its client has given it up.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from copy import deepcopy
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ryzanstein.lab.simulation.leaders.scripts import SCRIPTS, Data
from ryzanstein.lab.simulation.machine.loop import SimulatedLoop
from ryzanstein.lab.simulation.machine.network import SimulatedNetwork
from ryzanstein.lab.simulation.machine.process import Process
from ryzanstein.storage.redis_client import TIMEOUT_S

HOST = "redis"
URL = f"redis://{HOST}:6379"
FORGETS_S = 1.0
"""What a server that took over may lack: its last writes of so long."""
_REPEAT_S = 0.2
_SILENT_S = 0.3
_TOO_LATE_S = 15.0
_BARE = Context()


class SimulatedRedis:
    """The server. `on_command` is called with the client's process before and after each command."""

    def __init__(self, loop: SimulatedLoop, network: SimulatedNetwork, rng: random.Random) -> None:
        self.loop, self.network, self.rng = loop, network, rng
        self.data: Data = {}
        self.is_away = False
        self.slow_share = self.lost_share = 0.0
        self.on_command: list[Callable[[Process, str], None]] = []
        self.forgot_at: list[float] = []
        self._before: deque[tuple[float, Data]] = deque()
        self._waiting: dict[asyncio.Future[Any], tuple[Process, float]] = {}
        """The commands without an answer, of whom each is, and when it was sent."""

    def client(self, process: Process) -> SimulatedRedisClient:
        """Returns a client that a process opens."""
        return SimulatedRedisClient(self, process)

    def hash_of(self, name: str) -> dict[str, str]:
        """Returns a hash as it is now."""
        return dict(self.data.get(name, {}))

    def forget(self) -> None:
        """Goes back by up to a second, as a replica that takes over. All connections end."""
        since = self.loop.now - self.rng.uniform(0.0, FORGETS_S)
        self.forgot_at.append(self.loop.now)
        while self._before and self._before[-1][0] > since:
            self.data = self._before.pop()[1]
        self.end_connections()

    def end_connections(self) -> None:
        for answer in list(self._waiting):
            self._answer(answer, RedisConnectionError("Connection closed by server."))

    def answers(self, process: Process) -> bool:
        """Whether it answers a client: it is there, and no command of that client has waited for long."""
        waits = any(client is process and self.loop.now - sent_at > _SILENT_S for client, sent_at in self._waiting.values())
        return not (self.is_away or waits)

    def send(self, process: Process, work: Callable[[Data], Any]) -> asyncio.Future[Any]:
        """Sends a command. The answer may never come; the command may be done later."""
        answer: asyncio.Future[Any] = self.loop.create_future()
        self._waiting[answer] = process, self.loop.now
        answer.add_done_callback(lambda _: self._waiting.pop(answer, None))
        resent = self.rng.random() < 0.5
        self.loop.call_after(
            self._travel_s(), self._arrive, process, work, answer, resent, self.loop.now + _TOO_LATE_S, context=_BARE
        )
        return answer

    def _travel_s(self) -> float:
        slow = self.slow_share and self.rng.random() < self.slow_share
        return self.rng.uniform(0.2, 4.0) if slow else self.network.delay_s()

    def _arrive(
        self, process: Process, work: Callable[[Data], Any], answer: asyncio.Future[Any], resent: bool, until: float
    ) -> None:
        if not self.network.reaches(process.machine.name, HOST):
            if resent and self.loop.now < until:  # the kernel goes on sending what a process left
                self.loop.call_after(_REPEAT_S, self._arrive, process, work, answer, resent, until, context=_BARE)
            return
        if self.is_away:
            process.call_later(self.network.delay_s(), self._answer, answer, RedisConnectionError("Connection refused."))
            return
        for notify in self.on_command:
            notify(process, "arrives")
        before = deepcopy(self.data)
        result = work(self.data)
        if self.data != before:
            self._before.append((self.loop.now, before))
            while self._before and self._before[0][0] < self.loop.now - FORGETS_S:
                self._before.popleft()
        lost = self.lost_share and self.rng.random() < self.lost_share
        for notify in self.on_command:
            notify(process, "answered")
        if not lost and self.network.reaches(HOST, process.machine.name):
            process.call_later(self._travel_s(), self._answer, answer, result)

    def _answer(self, answer: asyncio.Future[Any], result: Any) -> None:
        if answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


class SimulatedRedisClient:
    """What `RedisLease` and `RedisStore` use of `redis.asyncio.Redis`."""

    def __init__(self, server: SimulatedRedis, process: Process) -> None:
        self._server, self._process = server, process

    def register_script(self, text: str) -> Callable[..., Any]:
        """Returns a script as a function. Raises KeyError for one that is not known."""
        script = SCRIPTS[text]

        async def run(keys: Sequence[str] = (), args: Sequence[Any] = ()) -> Any:
            return await self._do(partial(script, keys=keys, args=[str(each) for each in args]))

        return run

    async def ping(self) -> bool:
        return bool(await self._do(lambda data: True))

    async def get(self, key: str) -> Any:
        return await self._do(lambda data: data.get(key))

    async def hgetall(self, key: str) -> Any:
        return await self._do(lambda data: dict(data.get(key, {})))

    async def hmget(self, key: str, names: Sequence[str]) -> Any:
        return await self._do(lambda data: [data.get(key, {}).get(name) for name in names])

    async def aclose(self) -> None:
        """Closes nothing."""

    async def _do(self, work: Callable[[Data], Any]) -> Any:
        """Sends a command; once more where its connection ended, as the real client does."""
        for last in (False, True):
            answer = self._server.send(self._process, work)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await answer
            except TimeoutError as error:
                if last:
                    raise RedisTimeoutError("Timeout reading from socket") from error
            except RedisConnectionError:
                if last:
                    raise
        raise AssertionError
