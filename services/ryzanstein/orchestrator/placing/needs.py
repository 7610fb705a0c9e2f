"""How much memory models take on each node, as the nodes measured it. Kept in memory only.

A node is asked with the answers to its heartbeats, and answers with its next beats.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from ryzanstein.cluster import ModelNeed, Node

MAX_ASKED = 16
# A directory may have been repaired or replaced after this time.
ASK_AGAIN_S = 30.0


@dataclass(slots=True)
class _NodeAnswers:
    """What one process of a node answered: needs and the times of the answers, by directory."""

    incarnation: str
    needs: dict[str, ModelNeed] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


class MeasuredNeeds:
    """The needs by node and directory. `paths` returns those of the deployments, `now` seconds."""

    def __init__(self, paths: Callable[[], Set[str]], now: Callable[[], float]) -> None:
        self._paths, self._now = paths, now
        self._nodes: dict[str, _NodeAnswers] = {}
        self._awaited: Counter[str] = Counter()
        self._wake: set[asyncio.Event] = set()

    def all(self) -> Mapping[str, Mapping[str, ModelNeed]]:
        """Returns the needs by node id and directory."""
        return {node_id: answers.needs for node_id, answers in self._nodes.items()}

    def note(self, node: Node, needs: Iterable[ModelNeed]) -> bool:
        """Records a node's answers; returns whether they differ from those before.

        What nobody asked for is dropped, which bounds what is kept.
        """
        answers, asked, changed = self._of(node), self._asked(), False
        for need in needs:
            if need.path in asked:
                changed |= answers.needs.get(need.path) != need
                answers.needs[need.path], answers.times[need.path] = need, self._now()
            if need.path in self._awaited:
                self._wake_all()
        for path in [path for path in answers.needs if path not in asked]:
            del answers.needs[path], answers.times[path]
        return changed

    def ask(self, node: Node) -> tuple[str, ...]:
        """Returns the directories that a node should measure: unknown ones, then the oldest."""
        if not node.plural:
            return ()
        times, old = self._of(node).times, self._now() - ASK_AGAIN_S
        due = [path for path in self._asked() if path in self._awaited or times.get(path, old) <= old]
        return tuple(heapq.nsmallest(MAX_ASKED, due, key=lambda path: (path in times, times.get(path, 0.0), path)))

    def forget(self, node_id: str) -> None:
        """Forgets a node that is no member any more."""
        self._nodes.pop(node_id, None)
        self._wake_all()

    async def measured(self, path: str, nodes: Callable[[], Iterable[Node]], limit_s: float) -> None:
        """Returns when every node has measured a directory, or after `limit_s`.

        What was an error before is asked again.
        """
        since = self._now()
        with self._awaiting(path) as event:
            try:
                async with asyncio.timeout(limit_s):
                    while any(not self._answered(node, path, since) for node in nodes()):
                        await event.wait()
                        event.clear()
            except TimeoutError:
                return

    def _answered(self, node: Node, path: str, since: float) -> bool:
        answers = self._of(node)
        need = answers.needs.get(path)
        return need is not None and (not need.error or answers.times[path] >= since)

    def _wake_all(self) -> None:
        for event in self._wake:
            event.set()

    @contextmanager
    def _awaiting(self, path: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._wake.add(event)
        self._awaited[path] += 1
        try:
            yield event
        finally:
            self._wake.discard(event)
            self._awaited[path] -= 1
            if not self._awaited[path]:
                del self._awaited[path]

    def _asked(self) -> Set[str]:
        return self._paths() | self._awaited.keys() if self._awaited else self._paths()

    def _of(self, node: Node) -> _NodeAnswers:
        known = self._nodes.get(node.node_id)
        if known is None or known.incarnation != node.incarnation:
            known = self._nodes[node.node_id] = _NodeAnswers(node.incarnation)
        return known
