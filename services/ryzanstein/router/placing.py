"""Where a generation's next attempt goes, and when the generation must be given up.

Knows what failed it so far: nodes that are not to be asked again yet, and how long nothing has come.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ryzanstein import errors
from ryzanstein.router.attempt import BACK_PRESSURE, NO_PROGRESS, REQUEST_FAULT, Lost
from ryzanstein.router.generation_state import Generation
from ryzanstein.router.links import Links
from ryzanstein.router.patience import Patience
from ryzanstein.router.telemetry import Telemetry

# While no node can take a generation it looks again this often, besides at every change of a node: a breaker that
# becomes half-open is no event.
_LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class RunnerPolicy:
    """`failover_wait_s`: how long a generation waits for a node before it fails with NO_NODES. `max_fruitless_attempts`:
    how many attempts in a row may fail without a new token, so that a request which kills nodes kills few. `patience`: how
    long an attempt may bring nothing on a node that works for others."""

    failover_wait_s: float = 15.0
    max_fruitless_attempts: int = 5
    patience: Patience = field(default_factory=Patience)


class Placing:
    """Of one generation."""

    def __init__(self, generation: Generation, links: Links, policy: RunnerPolicy, telemetry: Telemetry) -> None:
        self._generation = generation
        self._links = links
        self._policy = policy
        self._telemetry = telemetry
        self._wish = links.wish(generation.request)
        self._excluded: set[str] = set()
        self._refused_by: set[str] = set()
        self._fruitless = 0
        self._stuck_since = time.monotonic()

    def worked(self) -> None:
        """The generation has grown: what was held against nodes is forgotten."""
        self._excluded.clear()
        self._fruitless = 0
        self._stuck_since = time.monotonic()

    def backups(self, node_id: str) -> list[str]:
        """Nodes that may run a backup of the attempt on `node_id`, the best first. A backup must itself be on time: in a
        cluster that is slow as a whole, or after a pause of this router, one more would only be more work."""
        return [each for each in self._candidates(node_id) if self._links.punctual(each)]

    async def first(self) -> str:
        """The node for the first attempt; waits for one. NO_NODES when none came."""
        return await self._wait(None)

    async def next(self, lost: Lost) -> str:
        """The node for the attempt after the last one was lost; waits for one. Raises the error that the client gets when the
        generation must be given up."""
        self._fruitless += 1
        if lost.cause == NO_PROGRESS:
            self._stuck_since = lost.at  # until now it was thought to be in good hands
        self._excluded.add(lost.run.node_id)
        self._require_blameless(lost)
        if self._fruitless >= self._policy.max_fruitless_attempts:
            raise self._give_up(lost)
        return await self._wait(lost)

    def _candidates(self, *excluded: str) -> list[str]:
        return self._links.candidates(self._generation.request.model, self._wish, {*excluded, *self._excluded})

    async def _wait(self, lost: Lost | None) -> str:
        while not (nodes := self._candidates()):
            self._require_begun(lost)
            left_s = self._stuck_since + self._policy.failover_wait_s - time.monotonic()
            if left_s <= 0:
                raise self._give_up(lost)
            await self._links.changed(min(left_s, _LOOK_AGAIN_S))
            self._excluded.clear()
        return nodes[0]

    def _require_begun(self, lost: Lost | None) -> None:
        """Who has no token yet need not wait in a full cluster: the refusal says when to come again."""
        if lost is not None and lost.error is not None and lost.cause == BACK_PRESSURE and not self._generation.log.num_tokens:
            raise lost.error

    def _require_blameless(self, lost: Lost) -> None:
        """Two nodes that are well and cannot run a request agree: it is the request. Raises the error of the second."""
        if lost.cause == REQUEST_FAULT and lost.error is not None:
            self._refused_by.add(lost.run.node_id)
            if len(self._refused_by) > 1 or not self._candidates():
                raise lost.error

    def _give_up(self, lost: Lost | None) -> errors.RyzansteinError:
        cause = "no_nodes" if lost is None else lost.cause
        self._telemetry.failed_over_in_vain.labels(cause).inc()
        if lost is not None and lost.error is not None:
            return lost.error
        return errors.no_nodes(self._generation.request.model, f"{self._fruitless} attempts failed ({cause})")
