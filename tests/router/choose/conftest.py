"""A chooser with a clock that a test moves, and an observer that remembers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ryzanstein.router.choose import (
    Affinity,
    BalanceSettings,
    ChoiceOutcome,
    Chooser,
    Imbalance,
    Members,
    NodeView,
    PolicyBounds,
    PolicyChoice,
    PolicyName,
)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Observed:
    """What an observer was told."""

    outcomes: Counter[ChoiceOutcome] = field(default_factory=Counter)
    switches: list[PolicyName] = field(default_factory=list)
    alarms: list[bool] = field(default_factory=list)
    last: Imbalance | None = None

    def chosen(self, model: str, policy: PolicyName, outcome: ChoiceOutcome) -> None:
        self.outcomes[outcome] += 1

    def judged(self, model: str, placed: Imbalance, alarm: bool) -> None:
        self.last = placed
        if self.alarms[-1:] != [alarm]:
            self.alarms.append(alarm)

    def switched(self, model: str, policy: PolicyName, wanted: Imbalance) -> None:
        self.switches.append(policy)


class PlacingChooser(Chooser):
    """Gives each request to the first node of its ranking."""

    def candidates(
        self, nodes: Sequence[NodeView], model: str, affinity: Affinity, excluded: Collection[str] = ()
    ) -> list[str]:
        ranking = self.rank(Members.of(node for node in nodes if node.model == model), model, affinity, excluded)
        if ranking.node_ids:
            self.place(ranking, ranking.node_ids[0])
        return list(ranking.node_ids)


@dataclass
class Desk:
    """A chooser under test."""

    chooser: PlacingChooser
    clock: Clock
    observed: Observed


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_desk(clock: Clock) -> Callable[..., Desk]:
    """By policy and bounds; `settings` are those of the balance."""

    def make(policy: PolicyName = "affinity", settings: BalanceSettings | None = None, **bounds: Any) -> Desk:
        observed = Observed()
        choice = PolicyChoice(policy, bounds=PolicyBounds(**bounds))
        return Desk(PlacingChooser(choice, settings or BalanceSettings(), observed, clock), clock, observed)

    return make
