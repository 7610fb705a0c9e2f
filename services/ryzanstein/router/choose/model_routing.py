"""Makes one model's choices (filter, score, pick) and measures how evenly they are spread.

All remembered state covers the last minutes and is rebuilt after a restart: nothing here decides
where a session belongs.

Chooses nodes for all models of a router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Annotated, Protocol, overload

from pydantic import Field

from ryzanstein.generation.request import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity
from ryzanstein.router.choose.members import Members, NodeGroup
from ryzanstein.router.choose.policies import PolicyChoice, PolicyName
from ryzanstein.router.choose.policy import pick
from ryzanstein.router.choose.recent_load import Balance, Imbalance, ImbalanceThresholds, RecentLoad

_JUDGED_EVERY_S = 1.0


class ChoiceOutcome(StrEnum):
    """Why a request went where it went.

    `PRIMARY`: to the node of its key. `HOME`: to another node, which answered its session last. The
    others went elsewhere because the key's node was too full (`OVERFLOWED`), could not take the
    request (`UNUSABLE`: draining, suspected, breaker open, no link), or had just failed it
    (`EXCLUDED`). `RESERVE`: to a reserve node, because no other could. `BALANCED`: the policy assigns no
    node to a key.
    """

    PRIMARY = "primary"
    HOME = "home"
    OVERFLOWED = "overflowed"
    UNUSABLE = "unusable"
    EXCLUDED = "excluded"
    RESERVE = "reserve"
    BALANCED = "balanced"


class ChoiceObserver(Protocol):
    """Receives choices. Its methods must neither block nor raise."""

    def chosen(self, model: str, policy: PolicyName, outcome: ChoiceOutcome) -> None: ...

    def judged(self, model: str, placed: Imbalance, alarm: bool) -> None: ...

    def switched(self, model: str, policy: PolicyName, wanted: Imbalance) -> None:
        """The model has this policy from now on. `wanted`: how uneven affinity alone would be."""
        ...


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """When the load of the nodes counts as uneven."""

    window_s: Annotated[float, Field(ge=1, le=86_400)] = 900.0
    """How far back the load counts, in seconds."""
    thresholds: ImbalanceThresholds = field(default_factory=ImbalanceThresholds)


class LazyOrder(Sequence[str]):
    """Node ids from an iterator, each read once, when it is asked for."""

    def __init__(self, node_ids: Iterator[str]) -> None:
        self._left = node_ids
        self._read: list[str] = []

    def __bool__(self) -> bool:
        return self._reaches(0)

    def __len__(self) -> int:
        self._read.extend(self._left)
        return len(self._read)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...

    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice) or at < 0 or not self._reaches(at):
            self._read.extend(self._left)
        return self._read[at]

    def _reaches(self, at: int) -> bool:
        while len(self._read) <= at:
            node_id = next(self._left, None)
            if node_id is None:
                return False
            self._read.append(node_id)
        return True


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of a ranking, which changes no state.

    `node_ids`: the nodes that can take the request, best first, the reserve behind all others. The rest is
    what a placement counts by. `primary`: the node of the request's key, and `wanted`: of those that take new work,
    whatever they have to do; both empty where the policy is not keyed. `nodes` share the load, and those of
    them that are `able` take new work.
    """

    model: str
    node_ids: Sequence[str]
    affinity: Affinity
    excluded: Collection[str]
    primary: str
    wanted: str
    nodes: NodeGroup
    able: frozenset[str]


class ModelRouting:
    """One model's policy, and the load that it caused."""

    def __init__(
        self,
        model: str,
        choice: PolicyChoice,
        settings: BalanceSettings,
        observer: ChoiceObserver,
        clock: Callable[[], float],
    ) -> None:
        self.configured = self.name = choice.name(model)
        self.policy = choice.make(self.name)
        self._model = model
        self._choice = choice
        self._observer = observer
        self._balance = Balance(settings.thresholds, clock)
        self._placed = RecentLoad(settings.window_s, clock)
        self._wanted = RecentLoad(settings.window_s, clock)
        self._seen: tuple[object, ...] = ()
        self._clock = clock
        self._judge_at = clock() + _JUDGED_EVERY_S

    def rank(self, affinity: Affinity, members: Members, excluded: Collection[str]) -> Ranking:
        """Returns a ranking; its `node_ids` are empty when no node can take the request.

        The reserve is ranked apart, as if there were no others, and has no part in how even the load is.
        """
        regular, _ = members.divided
        self._see(regular)
        parts = [self._pick(affinity, nodes, excluded) for nodes in members.divided if nodes.able]
        primary, wanted = self._belongs(affinity, regular)
        return Ranking(self._model, LazyOrder(chain(*parts)), affinity, excluded, primary, wanted, regular, regular.able)

    def _see(self, regular: NodeGroup) -> None:
        """Records which nodes are present, if others are than at the choice before."""
        seen = regular.version, regular.able
        if seen != self._seen:
            for load in (self._placed, self._wanted):
                load.see(regular.views, regular.able)
            self._seen = seen

    def _pick(self, affinity: Affinity, nodes: NodeGroup, excluded: Collection[str]) -> Iterator[str]:
        return pick(self.policy, affinity, nodes, nodes.able_but(excluded), self._placed)

    def _belongs(self, affinity: Affinity, nodes: NodeGroup) -> tuple[str, str]:
        """Returns the node of the request's key, of all and of the usable nodes."""
        if not self.policy.keyed:
            return "", ""
        primary = next(self.policy.order(affinity, nodes, nodes.views.keys()), "")
        return primary, primary if primary in nodes.able else next(self.policy.order(affinity, nodes, nodes.able), "")

    def place(self, ranking: Ranking, chosen: str) -> None:
        """Records that a node of the ranking was given the request."""
        self.policy.placed(ranking.affinity, chosen)
        if chosen in ranking.able:
            self._placed.placed(chosen)
            if not ranking.excluded:
                self._wanted.placed(ranking.wanted if self.policy.keyed else chosen)
        self._observer.chosen(self._model, self.name, self._outcome(ranking, chosen))
        self._judge(ranking.nodes)

    def _outcome(self, ranking: Ranking, chosen: str) -> ChoiceOutcome:
        if chosen not in ranking.able:
            return ChoiceOutcome.RESERVE
        if not self.policy.keyed:
            return ChoiceOutcome.BALANCED
        if chosen == ranking.primary:
            return ChoiceOutcome.PRIMARY
        if self.policy.homing and chosen == ranking.affinity.home:
            return ChoiceOutcome.HOME
        if ranking.primary in ranking.excluded:
            return ChoiceOutcome.EXCLUDED
        return ChoiceOutcome.OVERFLOWED if ranking.primary in ranking.able else ChoiceOutcome.UNUSABLE

    def _judge(self, nodes: NodeGroup) -> None:
        if self._clock() < self._judge_at:
            return
        usable = nodes.usable
        self._judge_at = self._clock() + _JUDGED_EVERY_S
        placed, wanted = self._placed.imbalance(usable), self._wanted.imbalance(usable)
        self._balance.judge(placed, wanted)
        self._observer.judged(self._model, placed, self._balance.alarm)
        name: PolicyName = "bounded" if self._balance.skewed else "affinity"
        if self.configured == "affinity" and name != self.name:
            self.name, self.policy = name, self._choice.make(name)
            self._observer.switched(self._model, name, wanted)


class Chooser:
    """A policy per model. Knows only its own choices and the nodes at the time of each call."""

    def __init__(
        self,
        choice: PolicyChoice,
        settings: BalanceSettings,
        observer: ChoiceObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = choice
        self._settings = settings
        self._observer = observer
        self._clock = clock
        self._models: dict[str, ModelRouting] = {}

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        """Returns what the request stays near under its model's policy."""
        return self._routing(request.model).policy.affinity_of(request)

    def rank(self, members: Members, model: str, affinity: Affinity, excluded: Collection[str] = ()) -> Ranking:
        """Returns the primary, its backup, and the rest of the model's members; no node when none can take the request.

        `excluded` are nodes that failed the request or run it already. May be called any number of
        times: only `place` counts.
        """
        return self._routing(model).rank(affinity, members, excluded)

    def place(self, ranking: Ranking, node_id: str) -> None:
        """Records that the request was given to this node of the ranking."""
        self._routing(ranking.model).place(ranking, node_id)

    def _routing(self, model: str) -> ModelRouting:
        """Returns a model's routing. There are few: each name here is one that a node serves."""
        if model not in self._models:
            self._models[model] = ModelRouting(model, self._choice, self._settings, self._observer, self._clock)
        return self._models[model]
