"""Chooses nodes for all models of a router."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from ryzanstein.generation.request import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity
from ryzanstein.router.choose.model_routing import BalanceSettings, ChoiceObserver, ModelRouting, Ranking
from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.policies import PolicyChoice


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
