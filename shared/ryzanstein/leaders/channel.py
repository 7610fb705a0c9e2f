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
"""Of the time that is left, how much one of several gets to answer. It may be frozen."""
_TRIES_OF_ONE = 3
_SERVICE = "/ryzanstein.v1.OrchestratorService/"
_REPEATABLE = frozenset(
    _SERVICE + name
    for name in ("ListNodes", "ListDeployments", "ListDeployedAdapters", "ListAudit", "DrainNode", "UndrainNode", "LeaveNode")
)
"""Calls that may be done twice. Of the others it must be sure that nothing was done, before another orchestrator is asked."""
_CHEAP = _SERVICE + "ListDeployedAdapters"
_NOT_SENT = ("failed to connect to all addresses", "DNS resolution failed")
"""How gRPC begins to say that a call has not left this process."""


class LeaderChannel:
    """What stubs need of a `grpc.aio.Channel`, over channels to the orchestrators.

    A call goes on to the leader that is named, else to the next one, until its timeout: none of those that stand by, or are
    not reached, has done it. One that must not be done twice goes to an orchestrator that has just answered; when its answer
    is lost, it fails with UNAVAILABLE. Streams go to the current one. The channels must not repeat calls by themselves.
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
        tries = 0
        while True:
            tries += 1
            if method[0] not in _REPEATABLE and self._addresses.several:
                await self._find(ends - now(), how)
            try:
                left_s = None if limit_s is None else max(0.0, ends - now()) * self._share(method)
                answer = await self._current().unary_unary(*method, **more)(request, timeout=left_s, **how)
            except grpc.aio.AioRpcError as failure:
                self._raise_if_final(method, failure, tries)
                silent = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if not self._addresses.failed(leader_named_by(failure), silent=silent):
                    if now() + _AGAIN_S >= ends:
                        raise
                    await asyncio.sleep(_AGAIN_S)
            else:
                self._addresses.answered()
                return answer

    def _share(self, method: Any) -> float:
        return _SHARE if self._addresses.several and method[0] in _REPEATABLE else 1.0

    def _raise_if_final(self, method: Any, failure: grpc.aio.AioRpcError, tries: int) -> None:
        """Raises unless another orchestrator may be asked, or the same one again."""
        lost, not_done = _is_lost(failure), _was_not_done(failure)
        if not (lost or not_done):
            raise failure
        if not (not_done or method[0] in _REPEATABLE):
            raise self._unknown(failure) from failure
        late = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if lost and not self._addresses.several and (late or tries >= _TRIES_OF_ONE):
            raise failure

    async def _find(self, left_s: float, how: dict[str, Any]) -> None:
        """Asks for something that may be asked twice, until one answers which leads. Raises when the time is over."""
        try:
            await self._call((_CHEAP, bytes, bytes), {}, b"", timeout=max(0.0, left_s), **how)
        except grpc.aio.AioRpcError as failure:
            if _was_not_done(failure) or _is_lost(failure):
                raise

    def _unknown(self, failure: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Returns the failure of a call that may have been done."""
        words = (
            f"no answer from the orchestrator at {self._addresses.current}: it may have done this or not, "
            f"look before asking again ({failure.details()})"
        )
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, failure.initial_metadata(), failure.trailing_metadata(), words)


def _was_not_done(failure: grpc.aio.AioRpcError) -> bool:
    """Whether an orchestrator surely did nothing, so that another one may."""
    if error_from_rpc(failure).reason in (NOT_LEADER, "STOPPING"):
        return True
    return failure.code() is grpc.StatusCode.UNAVAILABLE and str(failure.details()).startswith(_NOT_SENT)


def _is_lost(failure: grpc.aio.AioRpcError) -> bool:
    """Whether there was no answer: the connection ended, or it took too long."""
    if failure.code() is grpc.StatusCode.UNAVAILABLE:
        return error_from_rpc(failure).reason == "UNAVAILABLE"
    return failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
