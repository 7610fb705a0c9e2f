"""What must hold of many nodes and several routers together.

All routers soon see the same nodes after each change, choose the same node for a key, and hold nothing that grows with
time; links without work carry few messages; and no answer fails while nodes are left.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.checks import BrokenPromise, Checks, left_in
from ryzanstein.lab.simulation.cluster import Cluster, Service
from ryzanstein.lab.simulation.machine.network import SimulatedConnection
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL
from ryzanstein.router.assembly import Router
from ryzanstein.router.choose.affinity import Affinity
from ryzanstein.router.nodes.links.link import NodeLink

LOOK_S = 0.5
JOIN_S = 15.0
# A router's beat every two seconds, and its answer; and a little more, where something of the node changes.
QUIET_MESSAGES_PER_S = 1.2
_NO_WORK_FROM_S, _QUIET_FROM_S, _QUIET_UNTIL_S = 14.0, 24.0, 34.0
_KEYS, _KEYS_EVERY = 3, 4  # keys, and after so many looks
_FEW_TASKS = 40
_TASKS_PER_NODE = 6


@dataclass(frozen=True, slots=True)
class _Disturbance:
    """A change after which all routers must see the same nodes before `until`."""

    name: str
    began_at: float
    until: float


class WideChecks(Checks):
    """The checks of one wide simulation. Changes tell it of themselves, see `disturbed`."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.parted = frozenset[str]()
        """The nodes that the orchestrator cannot reach now."""
        self.wanted_revision = 0
        self.took_s: dict[str, list[float]] = {}
        """How long it took until all routers saw the same nodes again, by what had changed."""
        self.quiet_messages_per_s = 0.0
        """On a link without work, in the median; 0: there was none."""
        self.most: dict[str, int] = {}
        """The largest numbers that were seen."""
        self._disturbance: _Disturbance | None = _Disturbance("join", 0.0, JOIN_S)
        self._counted: list[dict[NodeLink, tuple[int, int]]] = []
        """At three times: of each link the attempts and the messages so far."""
        self._looks = 0
        self._addresses = {service: service.address for service in cluster.nodes}
        self._rng = cluster.rng("keys of affinity")

    def disturbed(self, name: str, within_s: float) -> None:
        """Records a change: all routers must see the same nodes again within this time."""
        self._finish_disturbance()
        self._disturbance = _Disturbance(name, self._now, self._now + within_s)

    def somebody_serves(self, model: str, *, foreign: bool = True) -> bool:
        return True

    def gave_up(
        self, error: RyzansteinError, progress_at: float, *, key: str, model: str, num_tokens: int, foreign: bool = True
    ) -> None:
        """Nothing may be given up: there are always nodes that can serve."""
        self.violated(BrokenPromise.GAVE_UP, f"{error.reason}: {error.message}", key=key)

    def all_complete(self, outcomes: dict[str, int]) -> None:
        """Checks that all answers were complete: clients leave none, and their deadlines are long."""
        failed = {outcome: count for outcome, count in outcomes.items() if outcome != "complete"}
        if failed:
            self.violated(BrokenPromise.GAVE_UP, f"answers ended otherwise: {failed}")

    @property
    def figures(self) -> dict[str, Any]:
        """Returns what was measured."""
        quiet = self.quiet_messages_per_s
        return {"converged_after_s": self.took_s, "messages_per_s_of_a_quiet_link": quiet, "most": self.most}

    @property
    def look_s(self) -> float:
        return LOOK_S

    def look(self) -> None:
        """Looks at what all routers see."""
        for service in self._cluster.services:
            if service.process is not None and service.process.crashes:
                self._look_at_tasks(service.process)
        problem = self._differs()
        if not problem:
            self._finish_disturbance()
            self._looks += 1
            if self._looks % _KEYS_EVERY == 0:
                self._look_at_keys()
        elif self._disturbance is None:
            self.violated(BrokenPromise.VIEWS, f"{problem}, and nothing had changed")
            self.disturbed("a violation", JOIN_S)
        elif self._now > self._disturbance.until:
            after_s = self._now - self._disturbance.began_at
            self.violated(BrokenPromise.VIEWS, f"{problem} {after_s:.1f} s after {self._disturbance.name}")
            self.disturbed("a violation", JOIN_S)
        self._count_messages()
        self._see_most("timers", len(self._cluster.loop._timers))

    def _finish_disturbance(self) -> None:
        if self._disturbance is not None and not self._differs():
            name, took_s = self._disturbance.name, self._now - self._disturbance.began_at
            self.took_s.setdefault(name, []).append(round(took_s, 2))
            self._cluster.record.say("CONVERGED", name=name, after_s=round(took_s, 3))
            self._disturbance = None

    def _see_most(self, what: str, count: int) -> None:
        self.most[what] = max(self.most.get(what, 0), count)

    # What routers see.

    def _differs(self) -> str:
        """Returns how what a router or the orchestrator sees differs from what is there; empty: it does not."""
        alive = [node for node in self._cluster.nodes if node.alive and node.wanted]
        names = {node.name for node in alive}
        members = {self._addresses[node] for node in alive if node.name not in self.parted}
        if (problem := self._orchestrator_differs(names - self.parted)) or not members:
            return problem
        for service in self._cluster.routers:
            router = services.ROUTERS.get(service.process) if service.process is not None else None
            if router is None:
                return f"{service.name} is away"
            if (seen := router.linker._followed) != members:
                return f"{service.name} sees {_others(seen, members)}"
            linked = {link.node_id for link in router.linker.links if link.connected}
            if linked != names:
                return f"{service.name} is linked with {_others(linked, names)}"
        return ""

    def _orchestrator_differs(self, names: set[str]) -> str:
        service = self._cluster.orchestrator
        lead = services.LEADS.get(service.process) if service.process is not None else None
        if lead is None:
            return "the orchestrator is away"
        control = lead.control
        if control._settling is not None:
            return "the orchestrator waits for members"
        known = control._registry.node_ids()
        return "" if known == names else f"the orchestrator knows {_others(known, names)}"

    def _look_at_keys(self) -> None:
        """Checks that all routers agree to which node a key belongs."""
        for _ in range(_KEYS):
            affinity = Affinity(self._rng.randbytes(16), False)
            processes = [router.process for router in self._cluster.routers if router.process is not None]
            chosen = {each.name: each.run(_primary, services.ROUTERS[each], affinity) for each in processes}
            if len(set(chosen.values())) > 1:
                self.violated(BrokenPromise.VIEWS, f"a key belongs to several nodes: {chosen}")
                return
        self.reach("routers agreed on keys")

    # Messages on links without work.

    def _count_messages(self) -> None:
        """Counts the messages of ten seconds on links that had no work in them, nor in the ten seconds before."""
        at_s = (_NO_WORK_FROM_S, _QUIET_FROM_S, _QUIET_UNTIL_S)
        if len(self._counted) == len(at_s) or self._now < at_s[len(self._counted)]:
            return
        self._counted.append({link: (link._last_handle, _sent_on(link)) for link in self._links() if link.connected})
        if len(self._counted) < len(at_s):
            return
        first, begin, end = self._counted
        quiet = [link for link in end if link in first and link in begin and end[link][0] == first[link][0]]
        rates = [(end[link][1] - begin[link][1]) / (_QUIET_UNTIL_S - _QUIET_FROM_S) for link in quiet]
        self._counted = [{}, {}, {}]
        if not rates:
            return
        self.quiet_messages_per_s = round(statistics.median(rates), 3)
        if self.quiet_messages_per_s > QUIET_MESSAGES_PER_S:
            what = f"{self.quiet_messages_per_s:.2f} messages/s on {len(quiet)} links without work"
            self.violated(BrokenPromise.BOUND, what)

    def _links(self) -> Iterator[NodeLink]:
        for service in self._cluster.routers:
            router = services.ROUTERS.get(service.process) if service.process is not None else None
            if router is not None:
                yield from router.linker.links

    # The end.

    async def at_rest(self) -> None:
        """Checks after the calm that every node serves what it should, and that nothing is left."""
        self.look()
        for service in self._cluster.nodes:
            self._require_wide_at_rest(service)
        for service in self._cluster.routers:
            self._require_empty(service)
        for service in (*self._cluster.routers, self._cluster.orchestrator):
            self._require_few_tasks(service)

    def _require_wide_at_rest(self, service: Service) -> None:
        node = services.WIDE_NODES.get(service.process) if service.process is not None else None
        if node is None:
            self.violated(BrokenPromise.REST, f"{service.name} is not running")
            return
        if not node.loaded or node.drains:
            self.violated(BrokenPromise.REST, f"{service.name} is {node.state.name}")
        elif node.revision != self.wanted_revision:
            self.violated(BrokenPromise.REST, f"{service.name} serves revision {node.revision}, not {self.wanted_revision}")
        if len(node.running) or node.engine.load.running:
            self.violated(BrokenPromise.LEFT, f"{len(node.running)} generations run on {service.name}")
        if len(node.links._links) != len(self._cluster.routers):
            self.violated(BrokenPromise.LEFT, f"{service.name} has {len(node.links._links)} links")

    def _require_empty(self, service: Service) -> None:
        router = services.ROUTERS.get(service.process) if service.process is not None else None
        if router is None:
            return
        for what, count in _left(router):
            if count:
                self.violated(BrokenPromise.LEFT, f"{count} {what} on {service.name}")
        num_nodes = len(self._cluster.nodes)
        for what, count in _tables(router):
            self._see_most(what, count)
            if count != num_nodes:
                self.violated(BrokenPromise.LEFT, f"{count} {what} on {service.name}, for {num_nodes} nodes")

    def _require_few_tasks(self, service: Service) -> None:
        process = service.process
        count = 0 if process is None else len(process._tasks)
        self._see_most("tasks of a router or the orchestrator", count)
        if count > _FEW_TASKS + _TASKS_PER_NODE * len(self._cluster.nodes):
            self.violated(BrokenPromise.LEFT, f"{count} tasks on {service.name}")


def _primary(router: Router, affinity: Affinity) -> str:
    return router.links.rank(FIRST_MODEL, affinity, ()).primary


def _sent_on(link: NodeLink) -> int:
    """Returns the messages so far on a link that is up, in both directions."""
    assert link._connection is not None
    stream: Any = link._connection._stream
    connection: SimulatedConnection = stream.connection
    return connection.to_server.num_sent + connection.to_client.num_sent


def _others(seen: Any, wanted: Any) -> str:
    """Returns how two sets differ, with one example each."""
    missing, more = sorted(wanted - seen), sorted(seen - wanted)
    return f"{len(seen)} nodes, without {len(missing)} {missing[:1]} and with {len(more)} others {more[:1]}"


def _left(router: Router) -> Iterator[tuple[str, int]]:
    yield "running generations", router.core.running
    yield from left_in(router)


def _tables(router: Router) -> Iterator[tuple[str, int]]:
    table = router.linker._table
    yield "links", len(table.links)
    yield "nodes", len(table.nodes)
    yield "breakers", len(table.breakers)
    yield "names", len(router.linker._names)
    yield "addresses", len(router.linker._at)
