"""A channel whose unary calls reach the orchestrator that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from ryzanstein.leaders.addresses import OrchestratorAddresses
from ryzanstein.rpc.status import NOT_LEADER, error_from_rpc, leader_named_by

_LONGEST_S = 10.0
_AGAIN_S = 0.25
_SHARE = 0.6
"""Of the time that is left, how much one of several gets to answer. It may be frozen; its calls are safe to repeat."""


class LeaderChannel:
    """What stubs need of a `grpc.aio.Channel`, over channels to the orchestrators.

    A call goes on to the leader that is named, else to the next one, until its timeout. None of those that
    stand by has done it. Streams go to the current one.
    """

    def __init__(self, addresses: str, open_one: Callable[[str], grpc.aio.Channel]) -> None:
        self._addresses = OrchestratorAddresses(addresses)
        self._open_one = open_one
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    async def __aenter__(self) -> LeaderChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.SHUTDOWN if self._closed else self._current().get_state(try_to_connect)

    def unary_unary(self, *method: Any, **more: Any) -> Callable[..., Any]:
        return partial(self._call, method, more)

    def unary_stream(self, *method: Any, **more: Any) -> Any:
        return self._current().unary_stream(*method, **more)

    def stream_unary(self, *method: Any, **more: Any) -> Any:
        return self._current().stream_unary(*method, **more)

    def stream_stream(self, *method: Any, **more: Any) -> Any:
        return self._current().stream_stream(*method, **more)

    def _current(self) -> grpc.aio.Channel:
        address = self._addresses.current
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if address not in self._channels:
            self._channels[address] = self._open_one(address)
        return self._channels[address]

    async def _call(self, method: Any, more: Any, request: Any, **how: Any) -> Any:
        now = asyncio.get_running_loop().time
        limit_s: float | None = how.pop("timeout", None)
        ends = now() + (_LONGEST_S if limit_s is None else limit_s)
        while True:
            left_s = None if limit_s is None else max(0.0, ends - now()) * (_SHARE if self._addresses.several else 1.0)
            try:
                answer = await self._current().unary_unary(*method, **more)(request, timeout=left_s, **how)
            except grpc.aio.AioRpcError as failure:
                silent = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._addresses.several
                if not (silent or self._may_go_on(failure)):
                    raise
                if not self._addresses.failed(leader_named_by(failure), silent=silent):
                    if now() + _AGAIN_S >= ends:
                        raise
                    await asyncio.sleep(_AGAIN_S)
            else:
                self._addresses.answered()
                return answer

    def _may_go_on(self, failure: grpc.aio.AioRpcError) -> bool:
        """Whether an orchestrator did nothing, and another one may."""
        reason = error_from_rpc(failure).reason
        if reason == NOT_LEADER:
            return True
        gone = failure.code() is grpc.StatusCode.UNAVAILABLE and reason in ("UNAVAILABLE", "STOPPING")
        return gone and self._addresses.several
