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
    Bounds,
    Chooser,
    Imbalance,
    NodeView,
    Outcome,
    PolicyChoice,
    PolicyName,
)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Heard:
    """What an observer was told."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    switches: list[PolicyName] = field(default_factory=list)
    alarms: list[bool] = field(default_factory=list)
    last: Imbalance | None = None

    def chosen(self, model: str, policy: PolicyName, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1

    def judged(self, model: str, placed: Imbalance, alarm: bool) -> None:
        self.last = placed
        if self.alarms[-1:] != [alarm]:
            self.alarms.append(alarm)

    def switched(self, model: str, policy: PolicyName, wanted: Imbalance) -> None:
        self.switches.append(policy)


class PlacingChooser(Chooser):
    """Gives each request to the first node of its ranking."""

    def candidates(self, nodes: Sequence[NodeView], model: str, wish: Affinity, excluded: Collection[str] = ()) -> list[str]:
        ranking = self.rank(nodes, model, wish, excluded)
        if ranking.node_ids:
            self.place(ranking, ranking.node_ids[0])
        return list(ranking.node_ids)


@dataclass
class Desk:
    """A chooser under test."""

    chooser: PlacingChooser
    clock: Clock
    heard: Heard


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_desk(clock: Clock) -> Callable[..., Desk]:
    """By policy and bounds; `settings` are those of the balance."""

    def make(policy: PolicyName = "affinity", settings: BalanceSettings | None = None, **bounds: Any) -> Desk:
        heard = Heard()
        choice = PolicyChoice(policy, bounds=Bounds(**bounds))
        return Desk(PlacingChooser(choice, settings or BalanceSettings(), heard, clock), clock, heard)

    return make
