"""Makes one model's choices (filter, score, pick) and measures how evenly they are spread.

All remembered state covers the last minutes and is rebuilt after a restart: nothing here decides
where a session belongs.

Chooses nodes for all models of a router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field

from ryzanstein.generation.request import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity
from ryzanstein.router.choose.node_view import NodeView, divided, is_usable
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


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of a ranking, which changes no state.

    `node_ids`: the nodes that can take the request, best first, the reserve behind all others. `ranked`:
    every node that the policy ranked, whether or not it can take the request. The rest is what a placement
    counts by: `usable` are the nodes that share the load.
    """

    model: str
    node_ids: tuple[str, ...]
    affinity: Affinity
    excluded: Collection[str]
    ranked: tuple[str, ...]
    usable: Sequence[NodeView]

    @property
    def able(self) -> frozenset[str]:
        """The usable nodes, without the reserve."""
        return frozenset(node.node_id for node in self.usable)


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
        self._clock = clock
        self._judge_at = clock() + _JUDGED_EVERY_S

    def rank(self, affinity: Affinity, members: Sequence[NodeView], excluded: Collection[str]) -> Ranking:
        """Returns a ranking; its `node_ids` are empty when no node can take the request.

        The reserve is ranked apart, as if there were no others, and has no part in how even the load is.
        """
        regular, reserve = divided(members)
        usable = [node for node in regular if is_usable(node, self._model)]
        for load in (self._placed, self._wanted):
            load.see(regular, usable)
        ranked = self.policy.rank(affinity, regular if self.policy.keyed else usable)
        behind = self.policy.rank(affinity, [node for node in reserve if is_usable(node, self._model)])
        able = {node.node_id for node in usable}
        takers = [node for node in ranked if node.node_id in able and node.node_id not in excluded]
        last = [node for node in behind if node.node_id not in excluded]
        ordered = [node for part in (takers, last) for node in pick(self.policy, affinity, part, self._placed)]
        return Ranking(self._model, _ids(ordered), affinity, excluded, _ids([*ranked, *behind]), usable)

    def place(self, ranking: Ranking, chosen: str) -> None:
        """Records that a node of the ranking was given the request."""
        self.policy.placed(ranking.affinity, chosen)
        if chosen in ranking.able:
            self._placed.placed(chosen)
            if not ranking.excluded:
                self._wanted.placed(self._wanted_node(ranking, chosen))
        self._observer.chosen(self._model, self.name, self._outcome(ranking, chosen))
        self._judge(ranking.usable)

    def _wanted_node(self, ranking: Ranking, chosen: str) -> str:
        """Returns the node that affinity alone would have chosen."""
        if not self.policy.keyed:
            return chosen
        able = ranking.able
        return next(node_id for node_id in ranking.ranked if node_id in able)

    def _outcome(self, ranking: Ranking, chosen: str) -> ChoiceOutcome:
        primary = ranking.ranked[0]
        if chosen not in ranking.able:
            return ChoiceOutcome.RESERVE
        if not self.policy.keyed:
            return ChoiceOutcome.BALANCED
        if chosen == primary:
            return ChoiceOutcome.PRIMARY
        if self.policy.homing and chosen == ranking.affinity.home:
            return ChoiceOutcome.HOME
        if primary in ranking.excluded:
            return ChoiceOutcome.EXCLUDED
        return ChoiceOutcome.OVERFLOWED if primary in ranking.able else ChoiceOutcome.UNUSABLE

    def _judge(self, usable: Sequence[NodeView]) -> None:
        if self._clock() < self._judge_at:
            return
        self._judge_at = self._clock() + _JUDGED_EVERY_S
        placed, wanted = self._placed.imbalance(usable), self._wanted.imbalance(usable)
        self._balance.judge(placed, wanted)
        self._observer.judged(self._model, placed, self._balance.alarm)
        name: PolicyName = "bounded" if self._balance.skewed else "affinity"
        if self.configured == "affinity" and name != self.name:
            self.name, self.policy = name, self._choice.make(name)
            self._observer.switched(self._model, name, wanted)


def _ids(nodes: Sequence[NodeView]) -> tuple[str, ...]:
    return tuple(node.node_id for node in nodes)


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

    def rank(self, nodes: Sequence[NodeView], model: str, affinity: Affinity, excluded: Collection[str] = ()) -> Ranking:
        """Returns the primary, its backup, and the rest; no node when none can take the request.

        `excluded` are nodes that failed the request or run it already. May be called any number of
        times: only `place` counts.
        """
        return self._routing(model).rank(affinity, [node for node in nodes if node.model == model], excluded)

    def place(self, ranking: Ranking, node_id: str) -> None:
        """Records that the request was given to this node of the ranking."""
        self._routing(ranking.model).place(ranking, node_id)

    def _routing(self, model: str) -> ModelRouting:
        """Returns a model's routing. There are few: each name here is one that a node serves."""
        if model not in self._models:
            self._models[model] = ModelRouting(model, self._choice, self._settings, self._observer, self._clock)
        return self._models[model]
