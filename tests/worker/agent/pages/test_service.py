"""Pages between two nodes over a real socket: what is offered, sent, fetched, and refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.cluster import MemberAddresses
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import pages_pb2 as pb
from ryzanstein.v1.pages_pb2_grpc import PageServiceStub, add_PageServiceServicer_to_server
from ryzanstein.worker.agent.faces.pages import MAX_OFFERS, MAX_TRANSFERS, PEER_SHARE, PageServicer, _Arriving
from ryzanstein.worker.agent.pages.store import StoreFailed
from ryzanstein.worker.agent.pages.tiers import pieces
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes
from ryzanstein.worker.agent.pages.tiers.node_store import NodeStore
from ryzanstein.worker.agent.pages.tiers.pieces import MAX_KEYS, WHOLE_BYTES, frames_of, pieces_of


class Node:
    """A server with pages, and another node's view of it."""

    def __init__(self, mover: Any, scope: Any, counted: Any) -> None:
        self.mover, self.corrupt = mover, 0
        self.known = KnownNodes(counted.metrics.refuse_address)
        self._scope = scope
        pages = SimpleNamespace(metrics=counted.metrics, checked=self._checked)
        self.drains: set[str] = set()
        settings = SimpleNamespace(node_id="n")
        core = SimpleNamespace(version=SimpleNamespace(pages=pages), drains=self.drains, settings=settings)
        agent = SimpleNamespace(node=core)
        self.servicer = PageServicer(SimpleNamespace(of=lambda model: agent))  # type: ignore[arg-type]

    async def _checked(self, model: str, tenant: str, root: bytes) -> Any:
        if root != self._scope.root:
            raise errors.failed_precondition("FOREIGN_PAGES", "others")
        return self.mover, self._scope

    async def start(self, *, older: bool = False) -> None:
        self.server = RpcServer("127.0.0.1", 0, [])
        if not older:
            add_PageServiceServicer_to_server(self.servicer, self.server.server)
        await self.server.start()
        self.address = f"127.0.0.1:{self.server.port}"
        self.store = NodeStore(self.address, self._on_corrupt, self.known)

    def _on_corrupt(self) -> None:
        self.corrupt += 1

    async def runs(self, num_transfers: int) -> bool:
        return self.servicer._transfers.running == num_transfers

    async def close(self) -> None:
        await self.store.close()
        await self.server.stop(0)


async def several(pages: Any) -> AsyncIterator[Any]:
    """Yields batches of pages."""
    for start in range(0, len(pages), 4):
        yield pages[start : start + 4]


@pytest.fixture
async def node(new_mover: Any, scope: Any, counted: Any) -> AsyncIterator[Node]:
    node = Node(new_mover(), scope, counted)
    await node.start()
    yield node
    await node.close()


async def test_what_is_missing_is_offered_sent_and_fetched(node, chain, scope, counted) -> None:
    pages = chain(12)
    keys = [page.key for page in pages]
    await node.mover.put(pages[:2], b"")
    assert list(await node.store.missing(scope, keys)) == list(range(2, 12))
    assert await node.store.send(scope, keys[1], several(pages[2:])) == 10
    assert list(node.mover.pages.values()) == pages
    assert [node.mover.parents[key] for key in keys[2:]] == keys[1:-1]
    assert [page async for page in node.store.fetch(scope, keys)] == pages
    assert [page async for page in node.store.fetch(scope, [*keys[:5], b"x" * 17, *keys[5:]])] == pages[:5]
    assert counted("pages_received_total") == 10
    assert counted("page_bytes_received_total") == 10 * scope.sizes.block_bytes


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The number of pages in each message that a node received, or that the message was a piece of a page."""
    seen: list[str] = []
    real = _Arriving.add

    async def add(self: _Arriving, request: pb.SendPagesRequest) -> None:
        seen.append(str(len(request.pages.keys)) if request.HasField("pages") else "piece")
        await real(self, request)

    monkeypatch.setattr(_Arriving, "add", add)
    return seen


@pytest.fixture
async def older(new_mover: Any, scope: Any, counted: Any) -> AsyncIterator[Node]:
    """A node whose version takes pieces alone."""
    node = Node(new_mover(), scope, counted)
    real = node.servicer.OfferPages

    async def offered(request: Any, context: Any) -> Any:
        return pb.OfferPagesResponse(missing=(await real(request, context)).missing)

    node.servicer.OfferPages = offered  # type: ignore[method-assign]
    await node.start()
    yield node
    await node.close()


async def test_small_pages_go_together_and_to_an_older_node_one_by_one(node, older, chain, scope, arrived) -> None:
    pages = chain(10)
    await node.store.missing(scope, [])
    assert await node.store.send(scope, b"", several(pages)) == 10
    assert arrived == ["4", "4", "2"]
    arrived.clear()
    await older.store.missing(scope, [])
    assert await older.store.send(scope, b"", several(pages)) == 10
    assert arrived == ["piece"] * 10
    assert list(older.mover.pages.values()) == list(node.mover.pages.values()) == pages


async def test_an_older_node_that_fetches_gets_pieces(node, chain, scope) -> None:
    pages = chain(5)
    await node.mover.put(pages, b"")
    wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
    request = pb.FetchPagesRequest(scope=wire, keys=[page.key for page in pages])
    async with grpc.aio.insecure_channel(node.address) as channel:
        kinds = [response.HasField("piece") async for response in PageServiceStub(channel).FetchPages(request, timeout=60)]
        request.whole_pages_bytes = 2**32 - 1
        sizes = [len(response.pages.keys) async for response in PageServiceStub(channel).FetchPages(request, timeout=60)]
    assert (kinds, sizes) == ([True] * 5, [3, 2])


async def test_a_page_that_is_damaged_among_several_ends_the_chain_there(node, chain, scope, counted) -> None:
    pages = chain(6)
    wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
    (whole,) = frames_of(pb.SendPagesRequest, pages[:5], scope.root, scope.sizes, WHOLE_BYTES)
    (last,) = frames_of(pb.SendPagesRequest, pages[5:], scope.root, scope.sizes, WHOLE_BYTES)
    whole.pages.checksums[3] ^= 1
    begin = pb.SendPagesRequest(begin=pb.SendPagesBegin(scope=wire))
    async with grpc.aio.insecure_channel(node.address) as channel:
        response = await PageServiceStub(channel).SendPages(iter([begin, whole, last]), timeout=60)
    assert (response.stored, response.corrupt) == (3, 3)
    assert list(node.mover.pages.values()) == pages[:3]
    assert counted("pages_refused_total", cause="corrupt") == 1


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (lambda whole: whole.keys.append(b"k" * 17), "as many as checksums"),
        (lambda whole: whole.checksums.append(1), "as many as checksums"),
        (lambda whole: whole.keys.__setitem__(0, b"short"), "must have 17 bytes"),
        (lambda whole: setattr(whole, "contents", whole.contents[:-1]), "must have 12288 bytes"),
        (lambda whole: setattr(whole, "contents", bytes(WHOLE_BYTES + 1)), "at most 1048576 bytes"),
        (lambda whole: whole.Clear() or whole.SetInParent(), "at least one"),
    ],
)
async def test_what_are_no_pages_is_refused_by_name(node, chain, scope, broken, named) -> None:
    wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
    (frame,) = frames_of(pb.SendPagesRequest, chain(3), scope.root, scope.sizes, WHOLE_BYTES)
    broken(frame.pages)
    begin = pb.SendPagesRequest(begin=pb.SendPagesBegin(scope=wire))
    async with grpc.aio.insecure_channel(node.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=named):
            await PageServiceStub(channel).SendPages(iter([begin, frame]), timeout=60)
    assert node.mover.pages == {}


async def test_whole_pages_in_the_middle_of_a_page_are_refused(node, chain, scope) -> None:
    wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
    (frame,) = frames_of(pb.SendPagesRequest, chain(3), scope.root, scope.sizes, WHOLE_BYTES)
    first = pb.SendPagesRequest(piece=next(pieces_of(chain(1)[0], scope.root, 1000)))
    begin = pb.SendPagesRequest(begin=pb.SendPagesBegin(scope=wire))
    async with grpc.aio.insecure_channel(node.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="the next piece"):
            await PageServiceStub(channel).SendPages(iter([begin, first, frame]), timeout=60)


async def test_a_chain_of_more_pages_than_a_call_may_name_is_fetched(node, chain, scope) -> None:
    pages = chain(MAX_KEYS + 10)
    await node.mover.put(pages, b"")
    node.mover.batch = 256
    assert [page.key async for page in node.store.fetch(scope, [page.key for page in pages])] == [page.key for page in pages]


async def test_an_answer_has_a_bound_in_bytes_and_what_is_left_is_asked_for(node, chain, scope, monkeypatch) -> None:
    pages = chain(10)
    await node.mover.put(pages, b"")
    node.mover.batch = 1
    monkeypatch.setattr(pieces, "ANSWER_BYTES", 4 * scope.sizes.block_bytes)
    request = pb.FetchPagesRequest(
        scope=pb.PageScope(root=scope.root), keys=[page.key for page in pages], whole_pages_bytes=WHOLE_BYTES
    )
    async with grpc.aio.insecure_channel(node.address) as channel:
        answers = [answer async for answer in PageServiceStub(channel).FetchPages(request, timeout=60)]
    assert sum(len(answer.pages.keys) for answer in answers) == 4
    assert [page async for page in node.store.fetch(scope, [page.key for page in pages])] == pages
    assert [page async for page in node.store.fetch(scope, [*(page.key for page in pages[:8]), b"x" * 17])] == pages[:8]


async def test_a_node_that_drains_gives_pages_and_takes_none(node, chain, scope) -> None:
    pages = chain(3)
    await node.mover.put(pages, b"")
    node.drains.add("stops")
    for call in (node.store.missing(scope, []), node.store.send(scope, b"", several(chain(2, 1)))):
        with pytest.raises(StoreFailed) as failure:
            await call
        assert (failure.value.cause, failure.value.rest_s) == ("draining", 2)
    assert [page async for page in node.store.fetch(scope, [page.key for page in pages])] == pages


async def test_foreign_pages_are_refused_and_the_sender_rests(node, chain, scope) -> None:
    foreign = replace(scope, root=b"f" * 16)
    with pytest.raises(StoreFailed) as failure:
        await node.store.send(foreign, b"", several(chain(3)))
    assert (failure.value.cause, failure.value.rest_s) == ("refused", 60)
    with pytest.raises(StoreFailed):
        await node.store.missing(foreign, [])
    assert node.mover.pages == {}


async def test_a_corrupt_page_and_those_after_it_are_not_stored(node, chain, scope, counted) -> None:
    pages = chain(6)

    async def frames() -> AsyncIterator[pb.SendPagesRequest]:
        wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
        yield pb.SendPagesRequest(begin=pb.SendPagesBegin(scope=wire))
        for number, page in enumerate(pages):
            for piece in pieces_of(page, scope.root, 1000):
                if number == 3 and not piece.key:
                    piece.content = bytes(len(piece.content))
                yield pb.SendPagesRequest(piece=piece)

    async with grpc.aio.insecure_channel(node.address) as channel:
        response = await PageServiceStub(channel).SendPages(frames(), timeout=60)
    assert (response.stored, response.corrupt) == (3, 3)
    assert list(node.mover.pages.values()) == pages[:3]
    assert counted("pages_refused_total", cause="corrupt") == 1


async def test_a_page_of_another_size_is_an_error(node, chain, scope, counted) -> None:
    with pytest.raises(StoreFailed) as failure:
        await node.store.send(scope, b"", several([replace(chain(1)[0], content=b"short")]))
    assert failure.value.cause == "failed"
    assert counted("pages_refused_total", cause="malformed") == 1


async def test_a_fetch_believes_no_damaged_page(node, chain, scope) -> None:
    pages = chain(4)
    await node.mover.put([*pages[:2], replace(pages[2], content=bytes(scope.sizes.block_bytes)), pages[3]], b"")
    real = pages[2].checksum(scope.root)
    node.mover.pages[pages[2].key] = Liar(pages[2].key, bytes(scope.sizes.block_bytes), real)
    assert [page async for page in node.store.fetch(scope, [page.key for page in pages])] == pages[:2]
    assert node.corrupt == 1


class Liar:
    """A page whose content was damaged after its checksum was computed."""

    def __init__(self, key: bytes, content: bytes, checksum: int) -> None:
        self.key, self.content, self._checksum = key, content, checksum

    def checksum(self, root: bytes) -> int:
        return self._checksum


async def test_ranks_that_are_lost_make_the_node_unavailable(node, chain, scope) -> None:
    node.mover.lost = True
    for call in (node.store.missing(scope, []), node.store.send(scope, b"", several(chain(2)))):
        with pytest.raises(StoreFailed) as failure:
            await call
        assert (failure.value.cause, failure.value.rest_s) == ("unavailable", 2)


async def test_an_older_node_is_left_alone_and_one_that_is_gone_is_asked_again_soon(new_mover, scope, counted) -> None:
    older = Node(new_mover(), scope, counted)
    await older.start(older=True)
    with pytest.raises(StoreFailed) as failure:
        await older.store.missing(scope, [])
    assert (failure.value.cause, failure.value.rest_s) == ("unimplemented", 60)
    await older.server.stop(0)
    with pytest.raises(StoreFailed) as failure:
        await older.store.missing(scope, [])
    assert failure.value.cause == "unavailable"
    await older.store.close()


async def test_transfers_and_offers_are_bounded(node, chain, scope) -> None:
    transfers, offers = node.servicer._transfers._by_peer, node.servicer._offers._by_peer
    transfers["ipv4:10.0.0.1"], offers["ipv4:10.0.0.1"] = MAX_TRANSFERS, MAX_OFFERS
    for call in (node.store.send(scope, b"", several(chain(1))), node.store.missing(scope, [])):
        with pytest.raises(StoreFailed) as failure:
            await call
        assert failure.value.cause == "unavailable"
    async with grpc.aio.insecure_channel(node.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await PageServiceStub(channel).OfferPages(pb.OfferPagesRequest(scope=pb.PageScope(root=scope.root)))
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "64" in str(refusal.value.details())
    transfers["ipv4:10.0.0.1"] -= 1
    assert await node.store.send(scope, b"", several(chain(1))) == 1
    assert node.servicer._transfers.running == MAX_TRANSFERS - 1


async def test_one_peer_leaves_places_for_others(node, chain, scope) -> None:
    transfers, most = node.servicer._transfers._by_peer, int(MAX_TRANSFERS * PEER_SHARE)
    transfers["ipv4:127.0.0.1"] = most
    with pytest.raises(StoreFailed):
        await node.store.send(scope, b"", several(chain(1)))
    transfers["ipv4:10.0.0.1"] = transfers.pop("ipv4:127.0.0.1")
    assert await node.store.send(scope, b"", several(chain(1))) == 1
    assert dict(transfers) == {"ipv4:10.0.0.1": most}, "a peer without calls is not remembered"


async def test_a_node_that_the_orchestrator_does_not_name_is_not_dialled(node, chain, scope, counted) -> None:
    node.known.follow(MemberAddresses(b"1", ("127.0.0.1:1",)))
    for call in (node.store.missing(scope, []), node.store.send(scope, b"", several(chain(1)))):
        with pytest.raises(StoreFailed) as failure:
            await call
        assert failure.value.cause == "unknown_node"
    with pytest.raises(StoreFailed):
        _ = [page async for page in node.store.fetch(scope, [bytes(17)])]
    assert node.store._channels == {}
    assert counted("page_addresses_refused_total", cause="not_member") == 3
    node.known.follow(MemberAddresses(b"2", (node.address,)))
    assert await node.store.send(scope, b"", several(chain(1))) == 1


@pytest.mark.parametrize("num_bytes", [1, 16, 100_000])
async def test_a_parent_that_is_no_page_is_refused(node, scope, num_bytes) -> None:
    async with grpc.aio.insecure_channel(node.address) as channel:
        wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
        begin = pb.SendPagesBegin(scope=wire, parent=bytes(num_bytes))
        with pytest.raises(grpc.aio.AioRpcError, match=r"begin\.parent"):
            await PageServiceStub(channel).SendPages(iter([pb.SendPagesRequest(begin=begin)]), timeout=60)


@pytest.mark.parametrize("timeout_s", [None, 91.5, 10_000])
async def test_a_transfer_must_have_a_deadline(node, scope, timeout_s) -> None:
    wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
    begin = pb.SendPagesRequest(begin=pb.SendPagesBegin(scope=wire))
    async with grpc.aio.insecure_channel(node.address) as channel:
        stub = PageServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=r"deadline: .* at most 90 s"):
            await stub.SendPages(iter([begin]), timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError, match=r"deadline: .* at most 90 s"):
            _ = [answer async for answer in stub.FetchPages(pb.FetchPagesRequest(scope=wire), timeout=timeout_s)]


async def test_callers_that_neither_read_nor_write_give_their_places_back(node, chain, scope, eventually) -> None:
    pages = chain(4096)
    await node.mover.put(pages, b"")
    wire = pb.PageScope(model=scope.model, tenant=scope.name, root=scope.root)
    fetch = pb.FetchPagesRequest(scope=wire, keys=[page.key for page in pages])

    async def begins() -> AsyncIterator[pb.SendPagesRequest]:
        yield pb.SendPagesRequest(begin=pb.SendPagesBegin(scope=wire))
        await asyncio.sleep(3600)

    # By default a client of gRPC may take all of it unread.
    small_window = (("grpc.http2.bdp_probe", 0),)
    async with grpc.aio.insecure_channel(node.address, small_window) as channel:
        stub = PageServiceStub(channel)
        calls = [stub.FetchPages(fetch, timeout=2) for _ in range(6)] + [stub.SendPages(begins(), timeout=2) for _ in range(6)]
        for running in (int(MAX_TRANSFERS * PEER_SHARE), 0):
            await eventually(partial(node.runs, running))
        assert await node.store.send(scope, b"", several(chain(1))) == 1
        assert {await call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
