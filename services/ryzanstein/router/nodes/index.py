"""What seldom changes of the nodes, by what is asked about it. A change of one costs the same however many there are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Set
from typing import Generic, NamedTuple, TypeVar

from ryzanstein.cluster import NO_MODEL, Beat, NodeState, Numerics, TokenOrigin
from ryzanstein.generation.prompts import MAX_NAME_CHARS
from ryzanstein.router.nodes.links.link import NodeLink

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=Hashable)

MAX_FURTHER_MODELS = 31  # of one node


def further_models(beat: Beat) -> tuple[str, ...]:
    """Returns the valid names of a node's other models without duplicates, at most MAX_FURTHER_MODELS."""
    names = dict.fromkeys(name for name in beat.other_models if 0 < len(name) <= MAX_NAME_CHARS)
    return tuple(names)[:MAX_FURTHER_MODELS]


class Multimap(Generic[_Key, _Value]):
    """Sets of values by keys. A key without values is not there; the values of a key keep the order in which they came."""

    def __init__(self) -> None:
        self._values: dict[_Key, dict[_Value, None]] = {}

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __getitem__(self, key: _Key) -> Set[_Value]:
        return self._values.get(key, {}).keys()

    def add(self, key: _Key, value: _Value) -> None:
        self._values.setdefault(key, {})[value] = None

    def discard(self, key: _Key, value: _Value) -> None:
        values = self._values.get(key, {})
        values.pop(value, None)
        if not values:
            self._values.pop(key, None)


class NodeFacts(NamedTuple):
    """What seldom changes of a node.

    `held` are the model and the context that it had when it was last ready, and `known_models` all that
    it has, or had before it was away.
    """

    model: str
    connected: bool
    ready: bool
    starts: bool
    reserve: bool
    context_length: int
    held: tuple[str, int]
    known_models: frozenset[str]
    features: frozenset[str]
    product: str
    unsupported: frozenset[str]
    origin: TokenOrigin

    @classmethod
    def of(cls, link: NodeLink) -> NodeFacts:
        beat, held = link.beat, link.held
        starting = beat.state in (NodeState.STARTING, NodeState.RECOVERING) and beat.reason != NO_MODEL
        return cls(
            beat.model,
            link.connected,
            link.connected and link.serves,
            link.connected and starting and not link.departed,
            beat.reserve,
            beat.context_length,
            ("", 0) if link.departed or beat.state is NodeState.FAILED else held,
            frozenset(filter(None, (link.known_model, *further_models(beat)))),
            link.features,
            link.engine.product,
            link.engine.unsupported,
            link.origin,
        )


class ReadyNodes:
    """The ready nodes of a model: how many, with which contexts, and how they compute, by engine and purpose."""

    def __init__(self) -> None:
        self.contexts = Counter[int]()
        self.numerics: dict[tuple[str, bool], Multimap[Numerics, str]] = {}

    @property
    def num_nodes(self) -> int:
        return self.contexts.total()

    def add(self, node_id: str, facts: NodeFacts) -> None:
        self.contexts[facts.context_length] += 1
        self.numerics.setdefault((facts.product, facts.reserve), Multimap()).add(facts.origin.numerics, node_id)

    def remove(self, node_id: str, facts: NodeFacts) -> None:
        self.contexts[facts.context_length] -= 1
        if not self.contexts[facts.context_length]:
            del self.contexts[facts.context_length]
        alike = self.numerics[facts.product, facts.reserve]
        alike.discard(facts.origin.numerics, node_id)
        if not alike:
            del self.numerics[facts.product, facts.reserve]


class NodeIndex:
    """The nodes by what is known of them."""

    def __init__(self) -> None:
        self._facts: dict[str, NodeFacts] = {}
        self.known_models = Multimap[str, str]()
        self.starting = Multimap[str, str]()
        """By the model that the node names, or by the empty name."""
        self.abilities = Multimap[tuple[frozenset[str], frozenset[str]], str]()
        """By the features that the node understands, and what its engine does not support."""
        self.origins = Multimap[TokenOrigin, str]()
        self.ready: dict[str, ReadyNodes] = {}
        self._names: dict[str, list[tuple[bool, str]]] = {}
        self._lacking: dict[str, Counter[frozenset[str]]] = {}
        self._contexts: dict[str, dict[str, int]] = {}

    def put(self, node_id: str, link: NodeLink) -> Set[str]:
        """Takes what the link knows of a node. Returns the models that it had to do with and has; none if nothing is new."""
        before, facts = self._facts.get(node_id), NodeFacts.of(link)
        if facts == before:
            return frozenset()
        had = self.remove(node_id)
        self._add(node_id, facts)
        return had | self.models_of(node_id)

    def models_of(self, node_id: str) -> Set[str]:
        """Returns the models that a node has to do with."""
        facts = self._facts.get(node_id)
        return frozenset[str]() if facts is None else facts.known_models | {facts.model, facts.held[0]}

    def contexts(self, model: str) -> Mapping[str, int]:
        """Returns the contexts of the nodes that serve the model, or did, by node id."""
        return self._contexts.get(model, {})

    def first(self, model: str) -> str | None:
        """Returns the first node by name that has the model, a linked one if there is any."""
        names = self._names.get(model)
        return names[0][1] if names else None

    def lacking(self, model: str) -> frozenset[str]:
        """Returns what one of the engines of the model's nodes does not support."""
        return frozenset[str]().union(*self._lacking.get(model, ()))

    def _add(self, node_id: str, facts: NodeFacts) -> None:
        self._facts[node_id] = facts
        for model in facts.known_models:
            self.known_models.add(model, node_id)
        if facts.starts:
            self.starting.add(facts.model, node_id)
        self.abilities.add((facts.features, facts.unsupported), node_id)
        self.origins.add(facts.origin, node_id)
        if facts.ready:
            self.ready.setdefault(facts.model, ReadyNodes()).add(node_id, facts)
        insort(self._names.setdefault(facts.model, []), (not facts.connected, node_id))
        self._lacking.setdefault(facts.model, Counter())[facts.unsupported] += 1
        if facts.held[1]:
            self._contexts.setdefault(facts.held[0], {})[node_id] = facts.held[1]

    def remove(self, node_id: str) -> Set[str]:
        """Forgets a node, if it is there. Returns the models that it had to do with."""
        models, facts = self.models_of(node_id), self._facts.pop(node_id, None)
        if facts is None:
            return models
        for model in facts.known_models:
            self.known_models.discard(model, node_id)
        self.starting.discard(facts.model, node_id)
        self.abilities.discard((facts.features, facts.unsupported), node_id)
        self.origins.discard(facts.origin, node_id)
        if facts.ready:
            self.ready[facts.model].remove(node_id, facts)
        if facts.ready and not self.ready[facts.model].num_nodes:
            del self.ready[facts.model]
        self._forget_name(node_id, facts)
        self._forget_context(node_id, facts.held[0])
        return models

    def _forget_context(self, node_id: str, model: str) -> None:
        contexts = self._contexts.get(model, {})
        contexts.pop(node_id, None)
        if not contexts:
            self._contexts.pop(model, None)

    def _forget_name(self, node_id: str, facts: NodeFacts) -> None:
        names, lacking = self._names[facts.model], self._lacking[facts.model]
        del names[bisect_left(names, (not facts.connected, node_id))]
        lacking[facts.unsupported] -= 1
        if not lacking[facts.unsupported]:
            del lacking[facts.unsupported]
        if not names:
            del self._names[facts.model], self._lacking[facts.model]


class LinkPhases:
    """The open links by what they tell of a model that all nodes drain."""

    def __init__(self) -> None:
        self._phases: dict[NodeLink, tuple[str, str]] = {}
        self._links = Multimap[tuple[str, str], NodeLink]()

    def put(self, link: NodeLink, *, drained: bool, is_open: bool) -> None:
        """Takes a link's phase."""
        if link in self._phases:
            self._links.discard(self._phases.pop(link), link)
        if is_open:
            self._phases[link] = phase = _phase(link, drained)
            self._links.add(phase, link)

    def drained(self, model: str) -> tuple[str, ...]:
        """Returns the nodes of the model when all of them drain; none if another link may lead to one that helps."""
        if _UNKNOWN in self._links or ("ready", model) in self._links:
            return ()
        return tuple(sorted(link.node_id for link in self._links["drained", model]))


_UNKNOWN = ("", "")


def _phase(link: NodeLink, drained: bool) -> tuple[str, str]:
    if not link.connected:
        return _UNKNOWN
    if drained:
        return "drained", link.beat.model
    return ("ready", link.beat.model) if link.beat.state is NodeState.READY else _UNKNOWN
