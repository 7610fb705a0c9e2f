"""What a router knows of its nodes, by scans of all links: what tables and indices must agree with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ryzanstein.cluster import NO_MODEL, NodeState, TokenOrigin
from ryzanstein.generation.request import NO_DEFAULTS, AdapterRef, SamplingDefaults
from ryzanstein.router.choose import NodeView
from ryzanstein.router.nodes.breaker import BreakerState
from ryzanstein.router.nodes.compatibility import kinds_of
from ryzanstein.router.nodes.index import further_models
from ryzanstein.router.nodes.linker import Linker
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.table import NodeTable


class Scan:
    """The answers of a `Roster`."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table

    def views(self, model: str) -> dict[str, NodeView]:
        return {node_id: self.table.view(node_id) for node_id, link in self.table.nodes.items() if link.beat.model == model}

    def models(self) -> list[tuple[str, int, int]]:
        served: dict[str, list[int]] = {}
        for link in self.table.nodes.values():
            if link.connected and link.beat.state is NodeState.READY and link.beat.model:
                served.setdefault(link.beat.model, []).append(link.beat.context_length)
        return sorted((model, min(contexts), len(contexts)) for model, contexts in served.items())

    def sampling_defaults(self, model: str) -> SamplingDefaults:
        links = [(not link.connected, name, link) for name, link in self.table.nodes.items() if link.beat.model == model]
        if not links:
            return NO_DEFAULTS
        lacking = frozenset[str]().union(*(link.engine.unsupported for *_, link in links))
        return min(links, key=lambda each: each[:2])[2].beat.sampling_defaults.without(lacking)

    def known_models(self) -> frozenset[str]:
        links = self.table.nodes.values()
        listed = (model for link in links for model in (link.known_model, *further_models(link.beat)))
        return self.table.listed_models | frozenset(model for model in listed if model)

    def could_serve(self, model: str, excluded: Collection[str]) -> bool:
        for node_id, link in self.table.nodes.items():
            ready = link.connected and link.beat.state is NodeState.READY and link.beat.model == model
            wanted = not link.suspected and node_id not in self.table.draining and node_id not in excluded
            if ready and wanted and self.table.breakers[node_id].state is not BreakerState.OPEN:
                return True
        return False

    def lacking(self, features: frozenset[str], used: frozenset[str]) -> frozenset[str]:
        def able(link: NodeLink) -> bool:
            return features <= link.features and used.isdisjoint(link.engine.unsupported)

        return frozenset(node_id for node_id, link in self.table.nodes.items() if not able(link))

    def adapter(self, name: str) -> tuple[str, AdapterRef] | None:
        links = [link for link in self.table.nodes.values() if link.known_model and name in link.adapters.by_name]
        found = [(link.adapters.by_name[name], link.connected, link.known_model) for link in links]
        if not found:
            return None
        newest, _, model = max(found, key=lambda each: (each[1], each[0].revision, each[0].ref.digest))
        return model, newest.ref

    def without_adapter(self, adapter: AdapterRef) -> frozenset[str]:
        return frozenset(node_id for node_id, link in self.table.nodes.items() if not link.adapters.has(adapter.digest))

    def incompatible(self, origin: TokenOrigin) -> frozenset[str]:
        return frozenset(node_id for node_id, link in self.table.nodes.items() if link.origin.incompatible(origin))

    def drained(self, model: str) -> tuple[str, ...]:
        others = [link for link in self.table.links if not self._drained(link)]
        if not all(link.connected and link.beat.state is NodeState.READY and link.beat.model != model for link in others):
            return ()
        return tuple(sorted(link.node_id for link in self.table.links if link not in others and link.beat.model == model))

    def _drained(self, link: NodeLink) -> bool:
        wanted = link.node_id in self.table.draining and link.beat.state is NodeState.READY
        return link.connected and (wanted or link.beat.drained)

    def contexts(self, model: str) -> dict[str, int]:
        links = ((node_id, link) for node_id, link in self.table.nodes.items() if not link.departed)
        known = {node_id: link.context_of(model) for node_id, link in links if link.beat.state is not NodeState.FAILED}
        return {node_id: context for node_id, context in known.items() if context}

    def starting(self, model: str, excluded: Collection[str]) -> bool:
        def starts(link: NodeLink) -> bool:
            state = link.beat.state in (NodeState.STARTING, NodeState.RECOVERING) and link.beat.reason != NO_MODEL
            return link.connected and state and not link.context_of(model) and link.beat.model in ("", model)

        links = (link for node_id, link in self.table.nodes.items() if node_id not in excluded and not link.departed)
        return any(starts(link) for link in links)

    def kinds(self, model: str) -> tuple[int, int] | None:
        """The number of kinds by mistake, and of contexts."""
        links = [link for link in self.table.nodes.values() if link.connected and link.serves and link.beat.model == model]
        groups: dict[tuple[str, bool], list[NodeLink]] = {}
        for link in links:
            groups.setdefault((link.engine.product, link.beat.reserve), []).append(link)
        most = max((len(kinds_of(group)) for group in groups.values()), default=0)
        return (most, len(Counter(link.beat.context_length for link in links))) if links else None


class ScanningLinker(Linker):
    """Finds the links of an address among all links, and compares each with the membership at each change."""

    def follow(self, addresses: Collection[str], draining: Collection[str] = (), models: Collection[str] = ()) -> None:
        known = {link.address: link for link in self._running() if not link.model}
        for address in sorted(addresses):
            link = known.pop(address, None)
            if link is None:
                self._open(address)
            else:
                link.departed = False
                self._follow_models(link)
        for link in known.values():
            self._depart(link)
            self._follow_models(link)

    def _follow_models(self, first: NodeLink) -> None:
        if first.model or not (first.connected or first.departed):
            return
        known = {link.model: link for link in self._running() if link.model and link.address == first.address}
        for model in () if first.departed else further_models(first.beat):
            link = known.pop(model, None)
            if link is None:
                self._open(first.address, model)
            else:
                link.departed = False
        for link in known.values():
            self._depart(link)

    def _running(self) -> list[NodeLink]:
        return [link for link, task in self._table.links.items() if not task.done()]

    def outlives(self, link: NodeLink) -> bool:
        links = [other for other in self.links if other.address == link.address]
        listed = {model for first in links if not first.model for model in ("", *further_models(first.beat))}
        return link.model in listed and any(other.connected for other in links)

    def _unlisted(self, link: NodeLink) -> bool:
        firsts = [first for first in self.links if not first.model and first.address == link.address]
        return bool(link.model) and any(link.model not in further_models(first.beat) for first in firsts)
