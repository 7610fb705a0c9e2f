"""What tables and indices know after any events equals what a scan of all links finds, and costs no scan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.nodes.scanning import Scan, ScanningLinker

from ryzanstein.adapters import AdapterReport, NodeAdapter
from ryzanstein.cluster import NO_MODEL, Numerics, TokenOrigin
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import AdapterRef, GenerationRequest, SamplingParams
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.choose import BalanceSettings, Chooser, PolicyChoice
from ryzanstein.router.choose.telemetry import ChoiceTelemetry
from ryzanstein.router.nodes.index import NodeIndex
from ryzanstein.router.nodes.linker import Linker
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.links.phi_detector import PhiThresholds
from ryzanstein.router.nodes.links.suspicion import SuspicionLevel
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.nodes.table import NodeTable
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.adapters import report_to_wire

ADDRESSES = ["a:1", "b:1", "c:1", "d:1"]
MODELS = ["m", "n"]
FEATURES = ["constraints", "adapters"]


class Stream:
    """An open stream, without a node."""

    def __init__(self, hello: worker.NodeHello) -> None:
        self.hello = hello

    def send(self, *what: object) -> None: ...
    def end(self, cause: str) -> None: ...


class Sink:
    """The reader of an attempt."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what: None


class Side:
    """A router's linker and roster, whose links a test moves by hand."""

    def __init__(self, kind: type[Linker], clock: Callable[[], float]) -> None:
        self.telemetry = RouterTelemetry()
        self.table = NodeTable()
        self.awake = AwakeClock()
        chooser = Chooser(PolicyChoice(), BalanceSettings(), ChoiceTelemetry(self.telemetry), clock)
        self.roster = Roster("r", self.table, chooser, self.awake)
        self.linker = kind("r", self.table, PhiThresholds(jitter_s=3600.0), self.telemetry, self.awake)

    def link(self, address: str, model: str = "") -> NodeLink | None:
        return next((link for link in self.linker.links if (link.address, link.model) == (address, model)), None)

    def happen(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("follow", addresses, draining, models):
                self.linker.follow(addresses, draining, models)
            case ("breaker", node_id, what) if node_id in self.table.breakers:
                getattr(self.table.breakers[node_id], what)()
            case (str() as what, address, model, *values) if (link := self.link(address, model)) is not None:
                getattr(self, f"_{what}")(link, *values)

    def _up(self, link: NodeLink, name: str, incarnation: str, features: list[str], beat: worker.Beat) -> None:
        name = f"{name}/{link.model}" if link.model else name
        if not link.connected and not self.linker.name_taken(link, name, incarnation):
            link._up(Stream(worker.NodeHello(node_id=name, incarnation=incarnation, features=features, beat=beat)))  # type: ignore[arg-type]

    def _down(self, link: NodeLink, cause: str) -> None:
        if link.connected:
            link._down(cause)

    def _beat(self, link: NodeLink, beat: worker.Beat) -> None:
        if link.connected:
            link._receive(worker.ConnectResponse(beat=beat))

    def _adapters(self, link: NodeLink, report: AdapterReport) -> None:
        if link.connected:
            link._receive(worker.ConnectResponse(adapters=report_to_wire(report)))

    def _suspected(self, link: NodeLink, level: SuspicionLevel) -> None:
        if link._watch is not None:
            link._watch.level = level
            link._on_level(level, "silence")

    def _submit(self, link: NodeLink) -> None:
        if link.connected:
            with patch("ryzanstein.router.nodes.links.link.submit_now", lambda *what: worker.Submit()):
                link.submit(None, Sink())  # type: ignore[arg-type]

    def _cancel(self, link: NodeLink) -> None:
        link.cancel(link._last_handle)

    def _release(self, link: NodeLink) -> None:
        link.release(link._last_handle)

    async def close(self) -> None:
        await self.linker.close()
        await self.telemetry.background.close()
        self.awake.close()


BEATS = st.builds(
    worker.Beat,
    state=st.sampled_from([worker.NODE_STATE_READY] * 4 + [1, 3, 4, 5, 17]),
    model=st.sampled_from(["m", "m", "m", "n", ""]),
    context_length=st.sampled_from([0, 512, 4096]),
    load=st.builds(worker.Load, running=st.integers(0, 9), waiting=st.integers(0, 3), capacity=st.sampled_from([0, 8, 8, 16])),
    reason=st.sampled_from(["", "", NO_MODEL, "the node stops"]),
    other_models=st.lists(st.sampled_from(["m", "n", "", "o"]), max_size=3),
    numerics=st.sampled_from(["x", "x", "y"]),
    weights_digest=st.sampled_from([b"1", b"1", b"2"]),
    engine=st.sampled_from(["", "", "other 1"]),
    unsupported=st.lists(st.sampled_from(["constraint", "top_k"]), max_size=1),
    continues_inexactly=st.sampled_from([False, False, True]),
    reserve=st.sampled_from([False, False, False, True]),
)
REFS = [AdapterRef(name, digest * 32) for name in "xy" for digest in (b"1", b"2")]
REPORTS = st.builds(
    AdapterReport,
    st.lists(st.builds(NodeAdapter, st.sampled_from(REFS), st.integers(1, 2)), max_size=2).map(tuple),
    st.booleans(),
    st.lists(st.sampled_from(REFS), max_size=1).map(tuple),
)
PLACES = (st.sampled_from(ADDRESSES), st.sampled_from(["", "", "", *MODELS]))
SOME = st.frozensets(st.sampled_from(ADDRESSES))
NAMES = ["a", "b", "c", "d"]
EVENTS = (
    st.tuples(st.just("follow"), SOME | st.just(frozenset(ADDRESSES)), st.frozensets(st.sampled_from(NAMES)), st.just(["m"]))
    | st.tuples(
        st.just("up"), *PLACES, st.sampled_from(NAMES), st.sampled_from("12"), st.lists(st.sampled_from(FEATURES)), BEATS
    )
    | st.tuples(
        st.just("up"), *PLACES, st.sampled_from(NAMES), st.sampled_from("12"), st.lists(st.sampled_from(FEATURES)), BEATS
    )
    | st.tuples(st.just("down"), *PLACES, st.sampled_from(["link_lost", "closed", "not_trusted"]))
    | st.tuples(st.just("beat"), *PLACES, BEATS)
    | st.tuples(st.just("beat"), *PLACES, BEATS)
    | st.tuples(st.just("adapters"), *PLACES, REPORTS)
    | st.tuples(st.just("suspected"), *PLACES, st.sampled_from([SuspicionLevel.FINE, SuspicionLevel.SUSPECT]))
    | st.tuples(st.sampled_from(["submit", "submit", "cancel", "release"]), *PLACES)
    | st.tuples(
        st.just("breaker"),
        st.sampled_from(NAMES),
        st.sampled_from(["open", "sent", "withdrawn", "worked", "fault", "reset"]),
    )
    | st.tuples(st.just("pass"), st.floats(0.1, 20.0))
)
READY = worker.Beat(
    state=worker.NODE_STATE_READY, model="m", context_length=512, load=worker.Load(capacity=8), other_models=["n"]
)
START = [
    ("follow", frozenset(ADDRESSES), frozenset(), ["m"]),
    *(("up", address, "", name, "1", FEATURES, READY) for address, name in zip(ADDRESSES, NAMES, strict=True)),
]


def agree(side: Side) -> None:
    scan, roster, table = Scan(side.table), side.roster, side.table
    for model in [*MODELS, "o"]:
        groups = table.members(model).divided
        views = scan.views(model)
        assert groups[0].views | groups[1].views == views
        for nodes in groups:
            assert nodes.able == {node_id for node_id, view in nodes.views.items() if view.usable}
            assert nodes.num_sequences(nodes.able) == sum(views[node_id].sequences for node_id in nodes.able)
            assert nodes.num_capacity(nodes.able) == sum(views[node_id].capacity for node_id in nodes.able)
            assert nodes.relative_loads == {node_id: views[node_id].relative_load for node_id in nodes.able}
        assert roster.sampling_defaults(model) == scan.sampling_defaults(model)
        assert roster.contexts(model) == scan.contexts(model)
        assert roster.drained(model) == scan.drained(model)
        for excluded in ((), ("a",), ("a", "b", "c", "d")):
            assert roster.could_serve(model, excluded) == scan.could_serve(model, excluded)
            assert roster.starting(model, excluded) == scan.starting(model, excluded)
        shown = [
            side.telemetry.registry.get_sample_value(f"ryzanstein_router_model_{what}", {"model": model}) for what in KINDS
        ]
        assert (tuple(shown) if shown[0] is not None else None) == scan.kinds(model)
        assert roster.knows(model) or model not in scan.known_models()
    assert [(each.name, each.context_length, each.ready_nodes) for each in roster.models] == scan.models()
    assert roster.known_models == scan.known_models()
    for features in (frozenset(), frozenset(FEATURES[:1]), frozenset(FEATURES)):
        for used in (frozenset(), frozenset(["top_k"])):
            assert roster.lacking(features, used) == scan.lacking(features, used)
    for ref in REFS:
        assert roster.adapter(ref.name) == scan.adapter(ref.name)
        assert roster.without_adapter(ref) == scan.without_adapter(ref)
    for origin in (TokenOrigin(), TokenOrigin(Numerics("x", b"1")), TokenOrigin(Numerics("y"), False)):
        assert roster.incompatible(origin) == scan.incompatible(origin)


KINDS = ("kinds", "contexts")


def links(side: Side) -> list[tuple[Any, ...]]:
    return sorted((each.address, each.model, each.node_id, each.departed, each.connected) for each in side.linker.links)


async def until_departed(self: NodeLink) -> None:
    """What `NodeLink.run` is when a test moves the link: it ends as that does."""
    while self.connected or not self.departed or self._observer.outlives(self):  # noqa: ASYNC110
        await asyncio.sleep(0)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=12)
@given(events=st.lists(EVENTS, min_size=20, max_size=40))
def test_tables_and_links_equal_those_of_scans_after_any_events(events: list[tuple[Any, ...]]) -> None:
    now = [1000.0]

    async def drive() -> None:
        sides = [Side(kind, lambda: now[0]) for kind in (Linker, ScanningLinker)]
        for event in [*START, *events]:
            if event[0] == "pass":
                now[0] += event[1]
            else:
                for side in sides:
                    side.happen(event)
            for _ in range(4):
                await asyncio.sleep(0)
            agree(sides[0])
            assert links(sides[0]) == links(sides[1])
            assert sides[0].table.nodes.keys() == sides[1].table.nodes.keys()
        for side in sides:
            await side.close()
        assert not sides[0].table.nodes
        assert not sides[0].table.links

    clock = SimpleNamespace(monotonic=lambda: now[0])
    with patch("ryzanstein.router.nodes.linker.time", clock), patch.object(NodeLink, "run", until_departed):
        asyncio.run(drive())


class Counted:
    """Counts calls of methods."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *methods: tuple[type, str]) -> None:
        self.num = 0
        for owner, name in methods:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*what: Any, **named: Any) -> Any:
            self.num += 1
            return method(*what, **named)

        return call

    def during(self, work: Callable[[], object]) -> int:
        before = self.num
        work()
        return self.num - before


def addresses(num: int) -> list[str]:
    return [f"{number}:1" for number in range(num)]


async def large(num: int) -> Side:
    """A router with this many ready nodes."""
    side = Side(Linker, lambda: 0.0)
    side.linker.follow(addresses(num))
    for number in range(num):
        side.happen(("up", f"{number}:1", "", f"n{number}", "1", [], READY))
    return side


@pytest.fixture
def moved_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeLink, "run", until_departed)


@pytest.mark.usefixtures("moved_by_hand")
async def test_a_change_looks_at_its_own_node_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counted(monkeypatch, (NodeTable, "view"), (NodeTable, "settle"), (NodeIndex, "put"), (Linker, "_open_at"))
    counts = []
    for num in (10, 200):
        side = await large(num)
        link = side.link("3:1")
        assert link is not None
        drains = worker.Beat(state=worker.NODE_STATE_DRAINING, model="m", other_models=["n"])
        known = addresses(num)
        changes: list[Callable[[], object]] = [
            lambda link=link: link._receive(worker.ConnectResponse(beat=READY)),
            lambda link=link, beat=drains: link._receive(worker.ConnectResponse(beat=beat)),
            lambda side=side: side.table.breakers["n3"].open(),
            lambda side=side, known=known: side.linker.follow([*known, "new:1"]),
            lambda side=side, known=known: side.linker.follow(known),
            lambda side=side, known=known: side.linker.follow(known, ["n5"]),
            lambda link=link: link._down("link_lost"),
        ]
        counts.append([looks.during(change) for change in changes])
        await side.close()
    assert counts[0] == counts[1]
    assert max(counts[0]) < 20


@pytest.mark.usefixtures("moved_by_hand")
async def test_a_thousand_joins_cost_ten_times_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counted(monkeypatch, (NodeTable, "view"), (NodeTable, "settle"), (NodeIndex, "put"), (Linker, "_open_at"))
    costs = []
    for num in (100, 1000):
        side, known = Side(Linker, lambda: 0.0), addresses(num)

        def join(side: Side = side, known: list[str] = known) -> None:
            for number in range(len(known)):
                side.linker.follow(known[: number + 1])

        costs.append(looks.during(join))
        assert len(side.linker.links) == num
        await side.close()
    assert costs[1] == 10 * costs[0] > 0


@pytest.mark.usefixtures("moved_by_hand")
async def test_a_choice_looks_at_no_node_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    side = await large(200)
    looks = Counted(monkeypatch, (NodeTable, "view"), (NodeIndex, "put"))
    affinity = side.roster.affinity_of(GenerationRequest("m", TextPrompt("hello"), SamplingParams(), session_id="s"))
    assert looks.during(lambda: side.roster.place(ranking := side.roster.rank("m", affinity, ()), ranking.node_ids[0])) == 0
    side.table.breakers["n3"].open()
    assert looks.during(lambda: side.roster.rank("m", affinity, ())) == 0
    await side.close()


@pytest.mark.usefixtures("moved_by_hand")
async def test_a_change_wakes_those_who_wait_for_its_model_or_for_any(until: Any) -> None:
    side = await large(2)
    side.happen(("up", "1:1", "n", "n1", "1", [], worker.Beat(state=worker.NODE_STATE_READY, model="n")))
    woken: list[str] = []

    async def wait(model: str) -> None:
        await side.roster.changed(60.0, model)
        woken.append(model)

    tasks = [asyncio.create_task(wait(model)) for model in ("m", "n", "", "m")]
    await asyncio.sleep(0)
    link = side.link("1:1", "n")
    assert link is not None
    link._down("link_lost")
    await until(lambda: len(woken) == 2)
    assert sorted(woken) == ["", "n"]
    side.table.breakers["n0"].open()
    await until(lambda: len(woken) == 4)
    await asyncio.gather(*tasks)
    await side.roster.changed(0.01, "m")
    await side.close()
