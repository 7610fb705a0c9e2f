"""What a router knows of its nodes at first hand. `Linker` alone changes it, `Roster` answers from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ryzanstein.cluster import Beat
from ryzanstein.generation.names import MAX_NAME_CHARS
from ryzanstein.router.nodes.breaker import Breaker
from ryzanstein.router.nodes.departed import DepartedModels
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.report import RecentLosses

MAX_FURTHER_MODELS = 31  # of one node


def _departed_models() -> DepartedModels:
    return DepartedModels(time.monotonic)


@dataclass(slots=True)
class NodeTable:
    """The links of a router, and its nodes by their ids.

    `links` are all open links with the tasks that run them, also of addresses that never answered
    and of nodes that left the membership. `nodes` has the link of each node that ever answered and
    has not left, connected or not; `breakers` has the same keys. `draining` are node ids, and
    `listed_models` names, as the orchestrator knows them.
    """

    links: dict[NodeLink, asyncio.Task[None]] = field(default_factory=dict)
    nodes: dict[str, NodeLink] = field(default_factory=dict)
    breakers: dict[str, Breaker] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    listed_models: frozenset[str] = frozenset()
    departed_models: DepartedModels = field(default_factory=_departed_models)
    losses: RecentLosses = field(default_factory=RecentLosses)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wakes all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Returns when a node came, went or changed, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


def further_models(beat: Beat) -> Sequence[str]:
    """Returns the valid names of a node's other models without duplicates, at most MAX_FURTHER_MODELS."""
    names = dict.fromkeys(name for name in beat.other_models if 0 < len(name) <= MAX_NAME_CHARS)
    return tuple(names)[:MAX_FURTHER_MODELS]
