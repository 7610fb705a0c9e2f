"""Chooses the node of a generation's next attempt, and decides when to give the generation up.

Tracks what has failed the generation so far: nodes that must not be tried again yet, nodes that
cannot run it at all, how long it has had no node, and how many of its attempts ended in a way that
the request itself may have caused.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog

from ryzanstein import errors
from ryzanstein.cluster import TokenOrigin
from ryzanstein.errors import Code
from ryzanstein.generation.prompts import ChatPrompt, Role
from ryzanstein.generation.request import GenerationRequest, NodePlace
from ryzanstein.router.choose import LazyOrder, Ranking, beginning
from ryzanstein.router.failover.ability import Ability
from ryzanstein.router.failover.attempt import BACK_PRESSURE, OTHER_PROMPT, REFUSED, REQUEST_FAULT, SLOW, Lost
from ryzanstein.router.failover.patience import AttemptPatience
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.nodes.links.link import UNLOADED
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

# While no node can take a generation it looks again this often, besides at every change of a node:
# a breaker that becomes half-open is not an event. A node that failed or refused the generation is
# not tried again for at least as long.
_LOOK_AGAIN_S = 0.25
# A node that is full is not tried again for as long as it says, but not longer than this.
_LONGEST_PAUSE_S = 2.0
# The node was healthy, or its model was unloaded: that says nothing about the request.
_BLAMELESS = frozenset({BACK_PRESSURE, OTHER_PROMPT, REFUSED, REQUEST_FAULT, SLOW, UNLOADED})
# A node that had not accepted the attempt may have been gone before it arrived: two such losses
# count as one.
_STRIKE, _HALF_STRIKE = 1.0, 0.5


@dataclass(frozen=True, slots=True)
class RunnerPolicy:
    """The limits of a generation's attempts.

    `failover_wait_s` is how long a generation waits while no node could serve it before it fails
    with NO_NODES, whatever its age. `max_fruitless_attempts` is how many attempts in a row may end,
    without a new token, by a fault that the request may have caused, so that a request which kills
    nodes kills few. `patience` is how long an attempt may produce nothing on a node that works for
    others. `failover_to_incompatible`: an answer goes on at a node that computes other tokens where no
    other could serve it.
    """

    failover_wait_s: float = 15.0
    max_fruitless_attempts: int = 5
    patience: AttemptPatience = field(default_factory=AttemptPatience)
    failover_to_incompatible: bool = True


class NodePlacement:
    """Chooses the nodes of one generation."""

    def __init__(self, generation: Generation, links: Roster, policy: RunnerPolicy, telemetry: RouterTelemetry) -> None:
        self._generation = generation
        self._model = generation.request.model
        self._links = links
        self._policy = policy
        self._telemetry = telemetry
        self._ability = Ability(generation.request, links)
        self._affinity = links.affinity_of(generation.request)
        # Until when, in monotonic seconds; longer while other nodes remain.
        self._excluded: dict[str, float] = {}
        self._full: set[str] = set()  # of the excluded ones, those that only had no room
        self._barred: set[str] = set()
        self._refused_by: set[str] = set()
        self._slow: set[str] = set()
        self._strikes: list[float] = []
        self._grown_by = -1  # the attempt
        self._nobody_since: float | None = None
        # Of all nodes that were members at some refusal, also of those that have left since.
        self._contexts: dict[str, int] = {}
        self._ranking: Ranking | None = None

    def placed(self, node_id: str) -> None:
        """Records that an attempt starts on a node of the last ranking."""
        if self._ranking is not None:
            self._links.place(self._ranking, node_id)

    def backup(self, node_id: str) -> NodePlace | None:
        """Returns where the generation would go from this node, by the last ranking: if possible to one like it."""
        ranked = () if self._ranking is None else self._ranking.node_ids
        others = LazyOrder(other for other in ranked if other != node_id)
        if not others:
            return None
        unlike = self._links.incompatible(self._links.origin_of(node_id))
        return self._links.place_of(next((other for other in others if other not in unlike), others[0]))

    def previous(self, node_id: str) -> NodePlace | None:
        """Returns another node that may have computed the conversation's earlier turns.

        It is the one that answered last. If that was this node, it may have restarted since: then
        its backup, which was sent the pages. So where nobody knows who answered last.
        """
        request = self._generation.request
        if request.last_node not in ("", node_id):
            return self._links.place_of(request.last_node)
        return self.backup(node_id) if request.last_node or (request.kept and _has_history(request)) else None

    @property
    def conversation(self) -> bytes:
        """Returns what all turns of the conversation have in common; empty outside of one."""
        if self._affinity.sticky:
            key = self._affinity.key
        elif self._generation.request.kept:
            key = beginning(self._generation.request)
        else:
            return b""
        return blake2b(key, digest_size=16).digest()

    def worked(self, node_id: str, attempt: int, origin: TokenOrigin) -> None:
        """Forgets the faults of nodes and of the request, because the generation has grown: there, by this attempt."""
        before = self._generation.origin
        if attempt != self._grown_by and before is not None and origin.incompatible(before):
            self._telemetry.compatibility.moved.labels(self._model).inc()
            log.warning(
                "answer continued by a node that computes other tokens",
                generation_id=self._generation.generation_id,
                to_node=node_id,
                exact=origin.exact and before.exact,
                tokens=self._generation.log.num_tokens,
            )
        self._generation.origin, self._grown_by = origin, attempt
        self._excluded.clear()
        self._refused_by.clear()
        self._slow.clear()
        self._strikes.clear()

    def hedge_nodes(self, node_id: str) -> Sequence[str]:
        """Returns the nodes that may run a hedge for the attempt on `node_id`, best first.

        A hedge's node must itself be on time. In a cluster that is slow as a whole, or after a
        pause of this router, a hedge would only add work.
        """
        return self._punctual(node_id)

    def faster_than(self, node_id: str) -> bool:
        """Returns whether a node could take over from `node_id` that was not too slow for the generation itself."""
        return bool(self._punctual(node_id, *self._slow))

    def _punctual(self, *excluded: str) -> Sequence[str]:
        """Returns the candidates that are on time; of the reserve only where no other node is usable."""
        nodes = self._candidates(*excluded)
        able = frozenset[str]() if self._ranking is None else self._ranking.able
        return LazyOrder(each for each in nodes if (each in able or not able) and self._links.punctual(each))

    async def first(self) -> str:
        """Waits for a node for the first attempt and returns it.

        Raises NO_NODES when none becomes available in time.
        """
        return await self._wait(None)

    def note(self, lost: Lost) -> None:
        """Records that an attempt has ended. Another one may still run."""
        node_id = lost.run.node_id
        self._excluded[node_id] = time.monotonic() + _pause_s(lost)
        (self._full.add if lost.cause == BACK_PRESSURE else self._full.discard)(node_id)
        if strike := self._strike(lost):
            self._strikes.append(strike)
        if lost.cause == REFUSED or (lost.cause == OTHER_PROMPT and lost.run.described_prompt):
            self._barred.add(node_id)
        elif lost.cause == SLOW:
            self._slow.add(node_id)
        elif lost.cause == REQUEST_FAULT:
            self._refused_by.add(node_id)

    async def next(self, lost: Lost) -> str:
        """Waits for the node of the next attempt and returns it.

        `lost` is the last attempt to be lost, already passed to `note`. Raises the client's error
        when the generation must be given up.
        """
        self._require_blameless(lost)
        self._require_acceptable(lost)
        if sum(self._strikes) >= self._policy.max_fruitless_attempts:
            self._count_in_vain(lost)
            if lost.error is not None and self._lacks_memory(lost):
                raise lost.error
            raise errors.attempts_exhausted(len(self._strikes), lost.cause, lost.reason)
        return await self._wait(lost)

    def _strike(self, lost: Lost) -> float:
        """Returns how far the request may be the cause of the attempt's end."""
        if lost.run.fruitful or self._links.awake.lately_paused:
            return 0.0
        if lost.cause in _BLAMELESS and not self._lacks_memory(lost):
            return 0.0
        return _STRIKE if lost.run.was_accepted or lost.error is not None else _HALF_STRIKE

    def _candidates(self, *excluded: str) -> Sequence[str]:
        """Returns the nodes for the next attempt, best first; for a hedge, which has `excluded` nodes, only like ones."""
        barred, incompatible = {*excluded, *self._excluded, *self._barred, *self._ability.unable}, self._incompatible()
        nodes = self._ranked(barred | incompatible)
        if nodes or not incompatible or excluded or self._waits_for_like(incompatible):
            return nodes
        return self._ranked(barred)

    def _ranked(self, excluded: Collection[str]) -> Sequence[str]:
        self._ranking = self._links.rank(self._model, self._affinity, excluded)
        return self._ranking.node_ids

    def _incompatible(self) -> frozenset[str]:
        """Returns the nodes that would continue the answer with other tokens than those before; none before the first one."""
        origin = self._generation.origin
        return frozenset() if origin is None else self._links.incompatible(origin)

    def _waits_for_like(self, incompatible: Collection[str]) -> bool:
        """Returns whether a node that computes alike could go on sooner or later, and has not just failed it, or must."""
        failed = self._excluded.keys() - self._full
        like = self._links.could_serve(self._model, {*self._barred, *self._ability.unable, *failed, *incompatible})
        return like or not self._policy.failover_to_incompatible

    async def _wait(self, lost: Lost | None) -> str:
        while not (nodes := self._candidates()):
            self._require_begun(lost)
            self._require_hope(lost)
            left_s = self._left_s()
            if left_s <= 0:
                raise self._no_nodes(lost)
            await self._links.changed(min(left_s, _LOOK_AGAIN_S), self._model)
            self._readmit()
        self._nobody_since = None
        return nodes[0]

    def _require_hope(self, lost: Lost | None) -> None:
        """Raises an error where a generation that has not begun need not wait.

        No node can do what it asks for, or operators drain all nodes of the model: NO_NODES. Of one that has begun an adapter
        may have been removed meanwhile.
        """
        if lost is not None and lost.reason != errors.ADAPTER_NOT_SERVED:
            return
        if (never := self._ability.never()) is not None:
            cause, error = never
            self._telemetry.failed_over_in_vain.labels(cause).inc()
            raise error
        if lost is None and (drained := self._links.drained(self._model)):
            self._count_in_vain(None)
            raise errors.all_drain(self._model, drained)

    def _left_s(self) -> float:
        """Returns how much time is left to wait for a node.

        The time does not run while some node could serve the generation later.
        """
        now = self._links.awake.now()
        if self._links.could_serve(self._model, self._never()):
            self._nobody_since = None
        elif self._nobody_since is None:
            self._nobody_since = now
        return self._policy.failover_wait_s - (0.0 if self._nobody_since is None else now - self._nobody_since)

    def _never(self) -> frozenset[str]:
        """Returns the nodes that this generation will not go to."""
        incompatible = frozenset[str]() if self._policy.failover_to_incompatible else self._incompatible()
        return self._ability.unable | incompatible | self._barred

    def _readmit(self) -> None:
        now = time.monotonic()
        self._excluded = {node_id: until for node_id, until in self._excluded.items() if until > now}

    def _require_begun(self, lost: Lost | None) -> None:
        """Raises the node's refusal for a generation that has no token yet.

        It need not wait in a full cluster: the refusal says when to retry.
        """
        if lost is None or lost.error is None or lost.cause != BACK_PRESSURE or self._generation.log.num_tokens:
            return
        if lost.error.code in (Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED):
            raise lost.error

    def _require_blameless(self, lost: Lost) -> None:
        """Raises the second node's error when two healthy nodes cannot run the request.

        They agree, so the cause is the request.
        """
        if lost.cause == REQUEST_FAULT and lost.error is not None and not self._lacks_memory(lost):
            others = self._links.could_serve(self._model, self._never() | self._refused_by)
            if len(self._refused_by) > 1 or not others:
                raise lost.error

    def _lacks_memory(self, lost: Lost) -> bool:
        """Returns whether the node had no memory for an answer that has begun.

        Memory becomes free again, so the answer is tried on, also there, as long as its strikes
        allow. One that has not begun need not wait.
        """
        reason = None if lost.error is None else lost.error.reason
        return lost.cause == REQUEST_FAULT and reason == errors.OUT_OF_MEMORY and self._generation.log.num_tokens > 0

    def _require_acceptable(self, lost: Lost) -> None:
        if lost.error is not None and self._is_mistake(lost, unknown=True):
            raise lost.error

    def _is_mistake(self, lost: Lost, *, unknown: bool) -> bool:
        """Returns True when a refusal is the client's mistake.

        The first node's refusal counts for all nodes, with one exception: a node with a larger
        context may hold what a smaller one cannot, and such a node may be away at the moment, or
        starting. It counts also when it leaves the cluster while the generation waits for it. Once
        a node has accepted the generation, a refusal is no longer the client's mistake; the
        refusing node is only not tried again.
        """
        if lost.cause != REFUSED or self._generation.started is not None:
            return False
        if lost.reason == errors.ENGINE_LACKS:  # another node may have another engine
            return not self._links.could_serve(self._model, self._never())
        if lost.reason != errors.CONTEXT_TOO_LONG:
            return True
        self._contexts |= self._links.contexts(self._model)
        least, out = self._contexts.get(lost.run.node_id, 0), self._barred | self._ability.unable
        if any(context > least for node_id, context in self._contexts.items() if node_id not in out):
            return False
        return not (unknown and self._links.starting(self._model, out))

    def _no_nodes(self, lost: Lost | None) -> errors.RyzansteinError:
        if lost is not None and lost.error is not None and self._is_mistake(lost, unknown=False):
            # A node that was starting might have held it, but did not become ready.
            return lost.error
        self._count_in_vain(lost)
        why = f"none was available for {self._policy.failover_wait_s:g} s"
        if lost is None:
            return errors.no_nodes(self._model, why)
        return errors.no_nodes(self._model, f"{why}; the last attempt ended with {lost.reason or lost.cause}", lost.cause)

    def _count_in_vain(self, lost: Lost | None) -> None:
        self._telemetry.failed_over_in_vain.labels("no_nodes" if lost is None else lost.cause).inc()


def _pause_s(lost: Lost) -> float:
    """Returns how long the generation does not try the node again."""
    asked_s = lost.error.retry_after_s if lost.error is not None and lost.cause in (BACK_PRESSURE, REQUEST_FAULT) else None
    return min(max(asked_s or 0.0, _LOOK_AGAIN_S), _LONGEST_PAUSE_S)


def _has_history(request: GenerationRequest) -> bool:
    """Returns whether something was answered before in the conversation."""
    return isinstance(request.prompt, ChatPrompt) and any(message.role is Role.ASSISTANT for message in request.prompt.messages)
