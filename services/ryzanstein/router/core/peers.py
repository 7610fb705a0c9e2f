"""Calls to other routers: read, cancel or interrupt a generation there, ask about a session.

A call names the owner that it addresses (`OWNER` in its metadata). Any other router refuses it, so
that calls never loop. An owner is lost when it cannot be reached, does not answer, or its lease
expires during the call.
A reader that is passed from router to router keeps its position.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog
from grpc_status import rpc_status

from ryzanstein import errors
from ryzanstein.addresses import host_of, join_address
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.errors import ROUTER_TOO_OLD, RyzansteinError
from ryzanstein.generation.prompts import TENANT_ID
from ryzanstein.generation.tokens import Delta, Finished, GenerationEvent, PromptScores, Started
from ryzanstein.router.journal.journal import Head, Journal, JournalUnavailableError, Owner
from ryzanstein.router.sessions.claims import Holding
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import peer_pb2 as peer
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub
from ryzanstein.v1.peer_pb2_grpc import PeerServiceStub
from ryzanstein.wire.events import event_from_wire


class PassedReader:
    """Advances with the events that the reader gets; `wants` is False for one it already has."""

    def __init__(self, from_index: Mapping[int, int]) -> None:
        self.from_index = dict(from_index)
        self._started = False
        self._prompt = 0
        self._ended: set[int] = set()

    def wants(self, event: GenerationEvent) -> bool:
        match event:
            case Started():
                first, self._started = not self._started, True
                return first
            case PromptScores():
                self._prompt, before = max(self._prompt, event.first_index + len(event.tokens)), self._prompt
                return self._prompt > before
            case Delta():
                self.from_index[event.choice] = event.first_index + len(event.tokens)
                return True
            case Finished():
                first = event.choice not in self._ended
                self._ended.add(event.choice)
                return first


log = structlog.get_logger(__name__)

OWNER = "x-ryzanstein-owner"
# The relayed client sees nothing before the end. Routers of an earlier version ignore it.
WHOLE = "x-ryzanstein-whole"
MOVED = "GENERATION_MOVED"

UNREACHABLE = "unreachable"
SILENT = "silent"
LEASE_EXPIRED = "lease_expired"
RESTARTED = "restarted"
TOO_OLD = "too_old"

_LOOK_S = 0.25
# Looks in a row that must find a lease expired: after an outage of the store no lease is fresh.
_EXPIRED_LOOKS = 2
_Result = TypeVar("_Result")


def moved(generation_id: str) -> RyzansteinError:
    """Returns the error for a generation that another router has, or is about to have."""
    return errors.unavailable(MOVED, f"generation {generation_id[:64]} has moved to another router; attach again", 0.1)


@dataclass(eq=False)
class OwnerLostError(Exception):
    """The owner is lost, for this reason."""

    cause: str


class Peers:
    """Calls to other routers, over one channel for each router that is being called."""

    def __init__(self, journal: Journal, lease_s: float, dialer: Dialer = PLAIN) -> None:
        self._journal = journal
        self._dialer = dialer
        # Longer than it takes to see a just renewed lease expire: that is the better reason.
        self._answer_s = lease_s + 3 * _LOOK_S
        # By the owner and the version of the certificates.
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        self._users: Counter[tuple[str, int]] = Counter()

    async def attach(
        self, head: Head, generation_id: str, from_index: Mapping[int, int], *, whole: bool = False, tenant: str = ""
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yields the events of a generation from its owner. `whole` and `tenant`: see `Core.follow`.

        Raises OwnerLostError, or the generation's own error. Closing the iterator cancels the call.
        """
        request = inference.AttachGenerationRequest(generation_id=generation_id, from_index=from_index)
        async with self._channel(head.owner) as channel:
            metadata = (*_addressed(head.owner, tenant), (WHOLE, str(whole).lower()))
            call: Any = InferenceServiceStub(channel).AttachGeneration(request, metadata=metadata)
            try:
                # The owner sends its metadata at once; the first event may be late.
                await self._watched(call.initial_metadata(), head.owner, self._answer_s)
                while (response := await self._watched(call.read(), head.owner)) is not grpc.aio.EOF:
                    yield event_from_wire(response.event)
            except grpc.aio.AioRpcError as failure:
                raise _meaning(failure) from None
            finally:
                call.cancel()

    async def cancel(self, head: Head, generation_id: str, *, tenant: str = "") -> None:
        """Cancels a generation at its owner. Cancelling this coroutine cancels the call.

        Raises OwnerLostError, or the owner's own error: NOT_FOUND when the generation does not run.
        """
        request = inference.CancelGenerationRequest(generation_id=generation_id)
        async with self._channel(head.owner) as channel:
            call: Any = InferenceServiceStub(channel).CancelGeneration(request, metadata=_addressed(head.owner, tenant))
            try:
                await self._watched(call, head.owner, self._answer_s)
            except grpc.aio.AioRpcError as failure:
                raise _meaning(failure) from None
            finally:
                call.cancel()

    async def interrupt(self, owner_id: str, generation_id: str) -> bool:
        """Returns True when the owner has ended the generation, which has no reader.

        Returns False also when the owner cannot be asked, or is an older version.
        """
        request = peer.InterruptGenerationRequest(generation_id=generation_id)
        try:
            owner = await self._leaseholder(owner_id) or await self._last_known(owner_id)
            if owner is None or not owner.address:
                return False
            async with self._channel(owner) as channel:
                call: Any = PeerServiceStub(channel).InterruptGeneration(request, metadata=((OWNER, owner_id),))
                try:
                    return bool((await self._watched(call, owner, self._answer_s)).interrupted)
                finally:
                    call.cancel()
        except (grpc.aio.AioRpcError, OwnerLostError, JournalUnavailableError):
            return False

    async def holding(self, owner_id: str, session_id: str) -> Holding:
        """Asks an owner whether it still speaks in a session.

        It is gone when it has resigned, nothing listens at its address, another process does, or
        its lease has expired and it does not answer. A router whose lease has expired may only have
        lost the store, so it is asked too. An owner that does not answer while its lease is valid
        may only be slow: UNKNOWN, as while the journal cannot be reached.
        """
        try:
            owner = await self._found(owner_id)
            leased = owner is not None
            owner = owner or await self._last_known(owner_id)
            if owner is None or not owner.address:
                return Holding.UNKNOWN if leased else Holding.GONE
            return Holding.HELD if await self._check_session(owner, session_id) else Holding.FREE
        except OwnerLostError as error:
            return Holding.UNKNOWN if error.cause == SILENT else Holding.GONE
        except (JournalUnavailableError, RyzansteinError):
            return Holding.UNKNOWN

    async def _check_session(self, owner: Owner, session_id: str) -> bool:
        request = peer.CheckSessionRequest(session_id=session_id)
        async with self._channel(owner) as channel:
            call: Any = PeerServiceStub(channel).CheckSession(request, metadata=((OWNER, owner.owner_id),))
            try:
                return bool((await self._watched(call, owner, self._answer_s)).held)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise _meaning(failure) from None
            finally:
                call.cancel()
        # A router of an earlier version, or another process. No generation has an empty id: the
        # owner answers NOT_FOUND, any other process that it is not the owner.
        await self.cancel(Head(owner, 0), "")
        return False

    async def _found(self, owner_id: str) -> Owner | None:
        for look in range(_EXPIRED_LOOKS):
            await asyncio.sleep(_LOOK_S if look else 0)
            if (owner := await self._leaseholder(owner_id)) is not None:
                return owner
        return None

    async def _leaseholder(self, owner_id: str) -> Owner | None:
        """Returns the owner while its lease is valid.

        Raises JournalUnavailableError for every failure of the store, also an unexpected one: a
        reader of another router's generation must not end because of it.
        """
        return await _looked_up(owner_id, self._journal.find(owner_id))

    async def _last_known(self, owner_id: str) -> Owner | None:
        """Returns the owner also when its lease has expired, unless it resigned."""
        return await _looked_up(owner_id, self._journal.last_known(owner_id))

    async def _watched(self, answer: Awaitable[_Result], owner: Owner, limit_s: float = float("inf")) -> _Result:
        """Returns the answer. Raises OwnerLostError when the owner is lost before it arrives."""
        waiting = asyncio.ensure_future(answer)
        looks = expired = 0
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_S))[0]:
                looks += 1
                if looks * _LOOK_S >= limit_s:
                    raise OwnerLostError(SILENT)
                expired = 0 if await self._alive(owner) else expired + 1
                if expired == _EXPIRED_LOOKS:
                    raise OwnerLostError(LEASE_EXPIRED)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _alive(self, owner: Owner) -> bool:
        try:
            return await self._leaseholder(owner.owner_id) is not None
        except JournalUnavailableError:
            return True

    @asynccontextmanager
    async def _channel(self, owner: Owner) -> AsyncIterator[grpc.aio.Channel]:
        key = (owner.owner_id, self._dialer.version)
        if key not in self._channels:
            router = Peer(PeerRole.ROUTER, owner.owner_id.rpartition("/")[0])
            address = _address_in(owner.address, secure=self._dialer.secure)
            self._channels[key] = self._dialer.open(address, router, retries=False)
        channel = self._channels[key]
        self._users[key] += 1
        try:
            yield channel
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._channels[key]
                await channel.close()


def peer_target(address: str, tls_port: int) -> str:
    """Returns what a router publishes of where others reach it: host:port, and the port with TLS if it has one."""
    return f"{address},{tls_port}" if tls_port else address


def _address_in(target: str, *, secure: bool) -> str:
    """Returns host:port of a published target, of the port with TLS or without."""
    address, _, tls_port = target.partition(",")
    return join_address(host_of(address), tls_port) if secure and tls_port else address


def apart(event: GenerationEvent) -> Iterator[GenerationEvent]:
    """Yields an event as it is sent to another router.

    A delta has one text. With log probabilities the text of each token matters, so each token is
    sent as a delta of its own.
    """
    if not isinstance(event, Delta) or event.tokens[0].logprobs is None:
        yield event
        return
    for i, token in enumerate(event.tokens):
        yield Delta(event.choice, event.first_index + i, (token,), event.node_id, None if i else event.moved)


async def _looked_up(owner_id: str, answer: Awaitable[_Result]) -> _Result:
    try:
        return await answer
    except JournalUnavailableError:
        raise
    except Exception as error:
        # For each waiting reader four times a second: the recorder reports the outage.
        log.debug("lease lookup failed", owner_id=owner_id, error=repr(error))
        raise JournalUnavailableError(str(error)) from error


def _meaning(failure: grpc.aio.AioRpcError) -> Exception:
    """Returns the error of a failed call.

    A failure without a status of ours comes from the connection, not from the router.
    """
    if rpc_status.from_call(failure) is None:  # type: ignore[arg-type]
        return OwnerLostError(UNREACHABLE)
    error = error_from_rpc(failure)
    if error.reason == ROUTER_TOO_OLD:
        return OwnerLostError(TOO_OLD)  # it took the generation, and cannot read its request: this router may
    return OwnerLostError(RESTARTED) if error.reason == MOVED else error


def _addressed(owner: Owner, tenant: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call to an owner, which checks the tenant. An older one does not."""
    return ((OWNER, owner.owner_id), *(((TENANT_ID, tenant),) if tenant else ()))
