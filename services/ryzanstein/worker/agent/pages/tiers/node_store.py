"""The pages of another node, over its PageService."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import pages_pb2 as pb
from ryzanstein.v1.pages_pb2_grpc import PageServiceStub
from ryzanstein.worker.agent.pages.page import Page
from ryzanstein.worker.agent.pages.store import PageScope, StoreFailed
from ryzanstein.worker.agent.pages.tiers import pieces
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes
from ryzanstein.worker.agent.pages.tiers.pieces import MAX_KEYS, WHOLE_BYTES, Assembly, CorruptPage, frames_of, whole_pages

_ASK_S = 5.0
_SEND_S = 60.0
_SHORT_REST_S, _LONG_REST_S = 2.0, 60.0


class NodeStore:
    """A `PageStore` on another node. `on_corrupt` is called for each page that arrives damaged.

    It is dialled when it is first used, and used only while it is one of the `known` nodes.
    """

    def __init__(
        self, address: str, on_corrupt: Callable[[], None], known: KnownNodes, *, node_id: str = "", dialer: Dialer = PLAIN
    ) -> None:
        self._address, self._known, self._on_corrupt = address, known, on_corrupt
        self._expect, self._dialer = Peer(PeerRole.NODE, node_id), dialer
        self._channels: dict[int, grpc.aio.Channel] = {}  # by the version of the certificates; the last one is in use
        self._closed = False
        self._whole_bytes = 0  # that the node takes in one message, as it last said

    async def missing(self, scope: PageScope, keys: Sequence[bytes]) -> Sequence[int]:
        """See `PageStore.missing`."""
        stub = await self._stub()
        with _failures():
            request = pb.OfferPagesRequest(scope=_wire(scope), keys=keys)
            response = await stub.OfferPages(request, timeout=_ASK_S)
            self._whole_bytes = min(response.whole_pages_bytes, WHOLE_BYTES)
            return list(response.missing)

    async def send(self, scope: PageScope, parent: bytes, batches: AsyncIterator[Sequence[Page]]) -> int:
        """See `PageStore.send`. Several pages go in one message if the node has said that it takes that."""

        async def frames() -> AsyncIterator[pb.SendPagesRequest]:
            yield pb.SendPagesRequest(begin=pb.SendPagesBegin(scope=_wire(scope), parent=parent))
            async for pages in batches:
                for frame in frames_of(pb.SendPagesRequest, pages, scope.root, scope.sizes, self._whole_bytes):
                    yield frame

        stub = await self._stub()
        with _failures():
            response = await stub.SendPages(frames(), timeout=_SEND_S)
            return int(response.stored)

    async def fetch(self, scope: PageScope, keys: Sequence[bytes]) -> AsyncIterator[Page]:
        """See `PageStore.fetch`.

        One call asks for at most `MAX_KEYS` pages. An answer of `ANSWER_BYTES` is not all of it.
        """
        while keys:
            some, num, num_bytes = keys[:MAX_KEYS], 0, 0
            async for page in self._fetch(scope, some):
                yield page
                num, num_bytes = num + 1, num_bytes + len(page.content)
            if num < len(some) and num_bytes < pieces.ANSWER_BYTES:
                return
            keys = keys[num:]

    async def _fetch(self, scope: PageScope, keys: Sequence[bytes]) -> AsyncIterator[Page]:
        assembly = Assembly(scope.root, scope.sizes)
        wanted = iter(keys)
        stub = await self._stub()
        with _failures():
            request = pb.FetchPagesRequest(scope=_wire(scope), keys=keys, whole_pages_bytes=WHOLE_BYTES)
            call = stub.FetchPages(request, timeout=_SEND_S)
            try:
                async for response in call:
                    for page in _pages(response, assembly, scope):
                        if page.key != next(wanted, None):
                            return
                        yield page
            except CorruptPage:
                self._on_corrupt()
            finally:
                call.cancel()

    async def close(self) -> None:
        self._closed = True
        for channel in self._channels.values():
            await channel.close()

    async def _stub(self) -> Any:
        """Returns the node's service, on a channel with the present certificates. Raises StoreFailed.

        Calls on an earlier channel go on.
        """
        await self._known.check(self._address)
        if self._closed:
            raise StoreFailed("failed", _SHORT_REST_S)
        version = self._dialer.version
        if version not in self._channels:
            self._channels[version] = self._dialer.open(self._address, self._expect, retries=False)
        return PageServiceStub(self._channels[version])


def _pages(response: pb.FetchPagesResponse, assembly: Assembly, scope: PageScope) -> Iterator[Page]:
    """Yields the pages that a message has or completes."""
    if response.HasField("pages"):
        yield from whole_pages(response.pages, scope.root, scope.sizes)
    elif (page := assembly.add(response.piece)) is not None:
        yield page


@contextmanager
def _failures() -> Iterator[None]:
    """Raises StoreFailed for what can go wrong with a node."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        match error.code():
            case grpc.StatusCode.UNIMPLEMENTED:
                raise StoreFailed("unimplemented", _LONG_REST_S) from None
            case grpc.StatusCode.FAILED_PRECONDITION:
                raise StoreFailed("refused", _LONG_REST_S) from None
            case grpc.StatusCode.UNAVAILABLE if error_from_rpc(error).reason == "DRAINING":
                raise StoreFailed("draining", _SHORT_REST_S) from None
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise StoreFailed("unavailable", _SHORT_REST_S) from None
            case _:
                raise StoreFailed("failed", _SHORT_REST_S) from None
    except (RyzansteinError, grpc.aio.UsageError):
        # It sent what is no page, or the connection was closed here.
        raise StoreFailed("failed", _SHORT_REST_S) from None


def _wire(scope: PageScope) -> pb.PageScope:
    return pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
