"""The orchestrator's view: followed, resumed after gaps and restarts, and kept for the time when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.cluster import NO_MODEL, ModelReport, Node, NodeState
from ryzanstein.router.membership.cache import ViewCache
from ryzanstein.router.membership.view import ChangeMissedError, ClusterView, View, _models_of
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceServicer, add_OrchestratorServiceServicer_to_server
from ryzanstein.wire.membership import node_to_wire

Message = orchestrator.WatchClusterResponse


def node(node_id: str, address: str = "", **more: Any) -> orchestrator.Node:
    return node_to_wire(Node(node_id, address or f"127.0.0.1:{ord(node_id[0])}", state=NodeState.READY, **more))


def snapshot(version: int, *nodes: orchestrator.Node, epoch: str = "e") -> Message:
    return Message(snapshot=orchestrator.ClusterSnapshot(epoch=epoch, version=version, nodes=nodes))


def joined(version: int, what: orchestrator.Node) -> Message:
    return Message(delta=orchestrator.ClusterDelta(version=version, node=what))


def left(version: int, node_id: str) -> Message:
    return Message(delta=orchestrator.ClusterDelta(version=version, node_left=node_id))


class ScriptedOrchestrator(OrchestratorServiceServicer):
    """Sends each watcher a snapshot of `nodes`, then what `say` is links; `hang_up` ends all watches."""

    def __init__(self) -> None:
        self.nodes: list[orchestrator.Node] = []
        self.epoch = "e"
        self.watches: list[asyncio.Queue[Message | None]] = []
        self.num_watches = 0
        self.leader: tuple[int, str] = (0, "")
        self.known: list[tuple[int, str]] = []
        self.port = 0
        self._server: RpcServer | None = None

    async def start(self) -> None:
        self._server = RpcServer("127.0.0.1", self.port, [])
        add_OrchestratorServiceServicer_to_server(self, self._server.server)
        await self._server.start()
        self.port = self._server.port

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    def say(self, message: Message | None) -> None:
        for watch in self.watches:
            watch.put_nowait(message)

    async def WatchCluster(self, request: orchestrator.WatchClusterRequest, context: Any) -> AsyncIterator[Message]:
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.watches.append(messages)
        self.num_watches += 1
        self.known.append((request.known_epoch, request.known_leader_id))
        try:
            first = snapshot(1, *self.nodes, epoch=self.epoch)
            first.leader_epoch, first.leader_id = self.leader
            yield first
            while (message := await messages.get()) is not None:
                yield message
        finally:
            self.watches.remove(messages)


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedOrchestrator]:
    scripted = ScriptedOrchestrator()
    await scripted.start()
    yield scripted
    await scripted.stop()


class Followed:
    """A membership that remembers."""

    def __init__(self) -> None:
        self.addresses: frozenset[str] = frozenset()
        self.draining: frozenset[str] = frozenset()
        self.models: frozenset[str] = frozenset()
        self.times = 0

    def follow(self, addresses: Any, draining: Any = (), models: Any = ()) -> None:
        self.addresses, self.draining, self.models = frozenset(addresses), frozenset(draining), frozenset(models)
        self.times += 1


@pytest.fixture
async def followed(scripted: ScriptedOrchestrator, tmp_path: Path) -> AsyncIterator[tuple[Followed, RouterTelemetry]]:
    """A view that follows the scripted orchestrator."""
    links, telemetry = Followed(), RouterTelemetry()
    view = ClusterView("r", ["fixed:1"], links, ViewCache(tmp_path / "view.json"), telemetry)
    await view.start()
    task = asyncio.create_task(view.run(f"127.0.0.1:{scripted.port}"))
    yield links, telemetry
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_view_is_a_snapshot_and_the_changes_since() -> None:
    view = View()
    for message in (snapshot(4, node("a"), node("b")), joined(5, node("c", drain_requested=True)), left(6, "a")):
        view.apply(message)
    assert view.addresses == {"127.0.0.1:98", "127.0.0.1:99"}
    assert view.draining == {"c"}
    assert view.version == 6


def test_the_models_of_a_view_are_those_that_its_nodes_serve_load_again_or_let_sleep() -> None:
    reports = (
        ModelReport("ready", state=NodeState.READY),
        ModelReport("restarts", state=NodeState.RECOVERING, reason="rank 0 was killed"),
        ModelReport("asleep", state=NodeState.STARTING, reason=NO_MODEL, asleep=True),
        ModelReport("unloaded", state=NodeState.STARTING, reason=NO_MODEL),
        ModelReport("refused", state=NodeState.FAILED, reason="too large"),
    )
    view = View()
    view.apply(snapshot(1, node("a", model="ready", models=reports, memory_bytes=1), node("b", model="older"), node("c")))
    assert view.models == {"ready", "restarts", "asleep", "older"}


@pytest.mark.parametrize("version", [4, 6, 0])
def test_a_change_that_is_not_the_next_one_is_a_gap(version: int) -> None:
    view = View()
    view.apply(snapshot(4))
    with pytest.raises(ChangeMissedError):
        view.apply(joined(version, node("a")))


def test_a_change_before_any_snapshot_is_a_gap() -> None:
    with pytest.raises(ChangeMissedError):
        View().apply(joined(1, node("a")))


def test_changes_of_deployments_only_move_the_version() -> None:
    view = View()
    view.apply(snapshot(1, node("a")))
    view.apply(Message(delta=orchestrator.ClusterDelta(version=2, deployment_removed="m")))
    assert (view.version, view.addresses) == (2, {"127.0.0.1:97"})


async def test_members_come_and_go_and_fixed_nodes_stay(scripted: ScriptedOrchestrator, followed: Any, until: Any) -> None:
    links, _ = followed
    await until(lambda: bool(scripted.watches))
    scripted.say(joined(2, node("a")))
    await until(lambda: links.addresses == {"fixed:1", "127.0.0.1:97"})
    scripted.say(joined(3, node("a", drain_requested=True)))
    await until(lambda: links.draining == {"a"})
    scripted.say(joined(4, node("a", drain_requested=True, model="demo")))
    await until(lambda: links.models == {"demo"})
    scripted.say(left(5, "a"))
    await until(lambda: links.addresses == {"fixed:1"})
    assert links.models == set()


async def test_a_node_in_a_state_of_newer_nodes_is_a_member_and_the_view_is_followed_on(
    scripted: ScriptedOrchestrator, followed: Any, until: Any
) -> None:
    links, _ = followed
    await until(lambda: bool(scripted.watches))
    newer = node("a")
    newer.state = 17  # type: ignore[assignment]
    scripted.say(joined(2, newer))
    await until(lambda: links.addresses == {"fixed:1", "127.0.0.1:97"})
    scripted.say(joined(3, node("b")))
    await until(lambda: links.addresses == {"fixed:1", "127.0.0.1:97", "127.0.0.1:98"})
    assert scripted.num_watches == 1
    newer.node_id, newer.address = "c", "127.0.0.1:99"
    scripted.nodes = [newer]
    scripted.say(None)
    await until(lambda: links.addresses == {"fixed:1", "127.0.0.1:99"})


async def test_a_view_that_fails_is_followed_again_and_misses_nothing(
    scripted: ScriptedOrchestrator, until: Any, tmp_path: Path
) -> None:
    telemetry = RouterTelemetry()

    class Failing(Followed):
        def follow(self, addresses: Any, draining: Any = (), models: Any = ()) -> None:
            super().follow(addresses, draining, models)
            if self.times == 2:
                raise KeyError("nobody has thought of this")

    links = Failing()
    view = ClusterView("r", [], links, ViewCache(tmp_path / "view.json"), telemetry)
    await view.start()
    scripted.nodes = [node("a")]
    telemetry.background.supervise("view", lambda: view.run(f"127.0.0.1:{scripted.port}"))
    await until(lambda: links.times == 3)
    assert links.addresses == {"127.0.0.1:97"}
    labels = {"task": "view", "outcome": "failed"}
    assert telemetry.registry.get_sample_value("ryzanstein_router_background_task_ends_total", labels) == 1
    await telemetry.background.close()


async def test_a_change_of_load_alone_is_no_news(scripted: ScriptedOrchestrator, followed: Any, until: Any) -> None:
    links, _ = followed
    await until(lambda: bool(scripted.watches))
    scripted.say(joined(2, node("a")))
    await until(lambda: len(links.addresses) == 2)
    times = links.times
    for version in range(3, 20):
        scripted.say(joined(version, node("a", beat_time=float(version))))
    scripted.say(joined(20, node("b")))
    await until(lambda: len(links.addresses) == 3)
    assert links.times == times + 1


async def test_after_a_gap_the_view_is_taken_anew(scripted: ScriptedOrchestrator, followed: Any, until: Any) -> None:
    links, telemetry = followed
    await until(lambda: bool(scripted.watches))
    scripted.nodes = [node("b")]
    scripted.say(joined(7, node("a")))
    await until(lambda: links.addresses == {"fixed:1", "127.0.0.1:98"})
    assert telemetry.registry.get_sample_value("ryzanstein_router_view_resyncs_total", {"cause": "gap"}) == 1


async def test_after_the_orchestrators_restart_its_new_view_counts(
    scripted: ScriptedOrchestrator, followed: Any, until: Any
) -> None:
    links, telemetry = followed
    await until(lambda: bool(scripted.watches))
    await scripted.stop()
    scripted.epoch, scripted.nodes = "later", [node("c")]
    await scripted.start()
    await until(lambda: links.addresses == {"fixed:1", "127.0.0.1:99"})
    assert telemetry.registry.get_sample_value("ryzanstein_router_view_resyncs_total", {"cause": "epoch"}) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"addresses": 7}', '{"other": []}'])
async def test_a_broken_cache_is_an_empty_view(tmp_path: Path, content: str) -> None:
    (tmp_path / "view.json").write_text(content)
    assert await ViewCache(tmp_path / "view.json").load() == frozenset()


async def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ViewCache(tmp_path / "file" / "view.json")
    cache.keep(["a:1"])
    await cache.save()
    assert await ViewCache(tmp_path / "file" / "view.json").load() == frozenset()


async def test_the_cache_is_written_at_most_once_in_a_while_and_has_the_last_view_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    written: list[list[str]] = []
    monkeypatch.setattr(ViewCache, "_save", lambda self, addresses: written.append(addresses))
    cache = ViewCache(tmp_path / "view.json", pause_s=60.0)
    task = asyncio.create_task(cache.run())
    cache.keep({"a:1"})
    await until(lambda: bool(written))
    for number in range(100):
        cache.keep({f"{number}:1"})
        await asyncio.sleep(0)
    assert written == [["a:1"]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cache.save()
    await cache.save()
    assert written == [["a:1"], ["99:1"]]


async def test_a_write_that_comes_late_does_not_replace_a_later_one(tmp_path: Path) -> None:
    cache = ViewCache(tmp_path / "view.json")
    cache._save_in_order(2, ["later:1"])
    cache._save_in_order(1, ["earlier:1"])
    assert await cache.load() == {"later:1"}


CHANGES = st.tuples(
    st.sampled_from("abc"),
    st.none()
    | st.builds(
        Node,
        st.just(""),
        st.sampled_from(["x:1", "y:1", "z:1"]),
        drain_requested=st.booleans(),
        model=st.sampled_from(["", "m", "n"]),
        beat_time=st.floats(0, 9),
        tls_address=st.sampled_from(["", "t:1"]),
        memory_bytes=st.sampled_from([0, 1]),
        models=st.lists(
            st.builds(ModelReport, st.sampled_from(["m", "o", "x" * 200]), state=st.sampled_from(list(NodeState))), max_size=2
        ).map(tuple),
    ),
)


@given(secure=st.booleans(), changes=st.lists(CHANGES, min_size=5, max_size=20), again=st.integers(0, 20))
def test_the_membership_of_a_view_is_that_of_its_nodes_after_any_changes(
    secure: bool, changes: list[tuple[str, Node | None]], again: int
) -> None:
    view, nodes, version = View(secure), dict[str, Node](), 1
    view.apply(snapshot(version))
    for number, (node_id, change) in enumerate(changes):
        version += 1
        nodes.pop(node_id, None)
        if change is not None:
            nodes[node_id] = replace(change, node_id=node_id)
        if number == again:
            view.apply(snapshot(version, *map(node_to_wire, nodes.values())))
        else:
            view.apply(left(version, node_id) if change is None else joined(version, node_to_wire(nodes[node_id])))
        addresses = {node.address_with(tls=secure) for node in nodes.values()} - {""}
        models = {name for node in nodes.values() for name in _models_of(node) if 0 < len(name) <= 128}
        draining = {node.node_id for node in nodes.values() if node.drain_requested}
        assert (view.addresses, view.draining, view.models) == (addresses, draining, models)
        assert view.nodes.keys() == nodes.keys()


def test_a_change_of_load_leaves_the_membership_as_it_is() -> None:
    view = View()
    view.apply(snapshot(1, node("a", model="m"), node("b", model="m")))
    membership = view.membership
    view.apply(joined(2, node("a", model="m", beat_time=7.0)))
    assert view.membership is membership
    assert view.nodes["a"].beat_time == 7.0
    view.apply(joined(3, node("a", model="m", drain_requested=True)))
    assert view.membership is not membership


def ask(client: Any, tokens: int = 2) -> Any:
    messages = [inference.Message(role=inference.ROLE_USER, content="hello")]
    return client.inference.Chat(inference.ChatRequest(messages=messages, sampling=inference.SamplingParams(max_tokens=tokens)))


async def test_a_router_finds_its_nodes_and_serves_on_without_the_orchestrator(
    scripted: ScriptedOrchestrator, start_node: Any, start_router: Any
) -> None:
    worker = await start_node("a")
    scripted.nodes = [node("a", worker.address)]
    client = await start_router(ready_nodes=1, nodes="", orchestrator=f"127.0.0.1:{scripted.port}")
    await scripted.stop()
    assert (await ask(client)).node_id == "a"


async def test_a_router_that_starts_while_the_orchestrator_is_down_uses_the_last_view(
    scripted: ScriptedOrchestrator, start_node: Any, start_router: Any
) -> None:
    worker = await start_node("a")
    scripted.nodes = [node("a", worker.address)]
    settings = {"ready_nodes": 1, "nodes": "", "orchestrator": f"127.0.0.1:{scripted.port}"}
    await start_router(**settings)
    await scripted.stop()
    assert (await ask(await start_router(**settings))).node_id == "a"


async def test_a_node_whose_lease_was_lost_finishes_its_answers_and_takes_new_ones(
    scripted: ScriptedOrchestrator, start_node: Any, start_router: Any, until: Any
) -> None:
    worker = await start_node("a", step_s=0.01)
    scripted.nodes = [node("a", worker.address)]
    client = await start_router(ready_nodes=1, nodes="", orchestrator=f"127.0.0.1:{scripted.port}")
    running = ask(client, tokens=60)
    await until(lambda: bool(worker.submits))
    scripted.say(left(2, "a"))
    assert (await ask(client)).node_id == "a"
    assert (await running).usage.completion_tokens == 60
    await worker.die()
    await until(lambda: not client.router.links.snapshot())
    await until(lambda: not client.router.links.known_models)


async def test_a_node_that_shall_drain_gets_nothing_new(
    scripted: ScriptedOrchestrator, start_node: Any, start_router: Any, until: Any
) -> None:
    workers = {name: await start_node(name) for name in "ab"}
    scripted.nodes = [node(name, worker.address) for name, worker in workers.items()]
    client = await start_router(ready_nodes=2, nodes="", orchestrator=f"127.0.0.1:{scripted.port}")
    first = (await ask(client)).node_id
    scripted.say(joined(2, node(first, workers[first].address, drain_requested=True)))
    await until(lambda: any(view.drain_requested for view in client.router.links.snapshot()))
    assert (await ask(client)).node_id != first


async def test_a_leader_of_an_earlier_epoch_is_not_followed(
    scripted: ScriptedOrchestrator, followed: tuple[Followed, RouterTelemetry]
) -> None:
    links, _ = followed
    scripted.leader, scripted.nodes = (5, "b"), [node("a")]
    async with asyncio.timeout(10):
        while "127.0.0.1:97" not in links.addresses:
            scripted.say(None)
            await asyncio.sleep(0.01)
    for stale in ((4, "a"), (5, "a")):
        scripted.leader, scripted.nodes = stale, [node("z")]
        scripted.known.clear()
        scripted.say(None)
        async with asyncio.timeout(10):
            while len(scripted.known) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert set(scripted.known) == {(5, "b")}
        assert "127.0.0.1:97" in links.addresses
        assert "127.0.0.1:122" not in links.addresses
    scripted.leader = (6, "a")
    async with asyncio.timeout(10):
        while "127.0.0.1:122" not in links.addresses:
            scripted.say(None)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("several", [True, False])
async def test_one_of_several_orchestrators_that_falls_silent_is_left(
    scripted: ScriptedOrchestrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    monkeypatch.setattr("ryzanstein.router.membership.view.SILENT_S", 0.2)
    other = ScriptedOrchestrator()
    await other.start()
    scripted.nodes, other.nodes = [node("a")], [node("b")]
    links = Followed()
    view = ClusterView("r", [], links, ViewCache(tmp_path / "view.json"), RouterTelemetry())
    addresses = f"127.0.0.1:{scripted.port}" + (f",127.0.0.1:{other.port}" if several else "")
    task = asyncio.create_task(view.run(addresses))
    try:
        async with asyncio.timeout(10):
            while not links.addresses:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if several:
                while links.addresses != {"127.0.0.1:98"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(0.5)
                assert scripted.num_watches == 1, "a single one may be silent"
                scripted.say(Message())
                while scripted.num_watches < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await other.stop()
