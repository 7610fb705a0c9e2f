"""What operators and the orchestrator do to a node: change its model, drain, profile, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from ryzanstein import errors
from ryzanstein.cluster import MODEL_CHANGES, Beat, Deployment
from ryzanstein.cluster import Node as NodeDescription
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.agent.model_host import MODEL_REPLACED, ModelChoice
from ryzanstein.worker.agent.node import NodeAgent

log = structlog.get_logger(__name__)

MAX_PROFILE_STEPS = 100
DEFAULT_PROFILE_STEPS = 10
_OPERATOR, _ORCHESTRATOR = "requested by an operator", "requested by the orchestrator"


class Operations:
    """Operations on one node, one instance per agent.

    `started_with` is what the node serves unless the orchestrator deploys something else.
    """

    def __init__(self, node: NodeAgent, started_with: ModelChoice | None, address: Callable[[], str]) -> None:
        self._node = node
        self._started_with = started_with
        self._address = address
        self._changing = asyncio.Lock()
        self._switch: asyncio.Task[None] | None = None
        self._deployment: Deployment | None = None

    async def load(self, choice: ModelChoice) -> None:
        """Loads a model; returns when it is ready.

        Raises FAILED_PRECONDITION while generations run, when the model is refused, or when another
        model replaces it meanwhile. Once the load has begun, it goes on when the caller is
        cancelled: the node's state shows how it ends.
        """
        self._require_idle()
        await self._change("load_model", lambda: self._node.host.load(choice))
        await self._node.host.settled(choice)

    async def load_started_with(self) -> None:
        """Loads the initial model, if there is one, as `load` does.

        An operator may replace it meanwhile without an error.
        """
        if self._started_with is None:
            return
        try:
            await self.load(self._started_with)
        except RyzansteinError as error:
            if error.reason != MODEL_REPLACED:
                raise

    async def unload(self, name: str) -> None:
        """Unloads the model.

        Raises FAILED_PRECONDITION while generations run, NOT_FOUND for a model that is not loaded.
        Like `load`, it runs to its end once it has begun, also when the caller is cancelled.
        """
        self._require_model(name)
        self._require_idle()
        await self._change("unload_model", lambda: self._unload(name))

    async def _unload(self, name: str) -> None:
        self._require_model(name)  # another one may have been loaded since the first check
        await self._node.host.unload()

    async def _change(self, name: str, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs changes of the model one after the other.

        A change that has not begun when its caller is cancelled never begins.
        """
        await self._changing.acquire()
        await asyncio.shield(self._node.background.once(name, self._exclusively(change)))

    async def _exclusively(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            self._require_idle()
            await change()
        finally:
            self._changing.release()

    def _require_model(self, name: str) -> None:
        choice = self._node.host.choice
        if choice is None or name not in ("", choice.name):
            raise errors.not_found("model", name)

    async def drain(self, grace_s: float, reason: str = _OPERATOR) -> int:
        """Refuses new generations and waits for running ones; returns how many still run.

        It returns when all have ended or the grace has passed. Cancelling it changes nothing: the
        node drains until `undrain`.
        """
        self._node.drains.add(reason)
        self._node.changed()
        log.info("drain started", reason=reason, running=len(self._node.running), grace_s=grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self._node.running.idle.wait()
        except TimeoutError:
            log.warning("drain grace period expired", running=len(self._node.running))
        return len(self._node.running)

    def undrain(self) -> None:
        """Takes generations again, unless the orchestrator drains the node.

        Ranks in quarantine are started now.
        """
        self._node.drains.discard(_OPERATOR)
        self._node.host.revive()
        self._node.changed()
        log.info("undrain requested")

    async def profile(self, rank: int, steps: int) -> bytes:
        """Returns a Chrome trace of the rank's next steps.

        Raises INVALID_ARGUMENT, FAILED_PRECONDITION while another profile is recorded, or
        DEADLINE_EXCEEDED when the node has nothing to do.
        """
        node = self._node
        if rank >= node.settings.tp:
            raise errors.invalid("rank", f"must be less than {node.settings.tp}", rank)
        if steps > MAX_PROFILE_STEPS:
            raise errors.invalid("steps", f"must be at most {MAX_PROFILE_STEPS}", steps)
        if node.host.serving is None:
            raise errors.failed_precondition("NODE_NOT_READY", node.host.reason)
        return await node.profiling.record(node.host.serving.group, rank, steps or DEFAULT_PROFILE_STEPS)

    def describe(self) -> NodeDescription:
        """Returns the node's description as a member of its cluster."""
        node, beat = self._node, self._node.beat()
        return NodeDescription(
            node_id=node.settings.node_id,
            address=self._address(),
            incarnation=node.incarnation,
            tp=node.settings.tp,
            state=beat.state,
            model=beat.model,
            context_length=beat.context_length,
            load=beat.load,
        )

    def beat(self) -> Beat:
        return self._node.beat()

    def desire(self, deployment: Deployment | None, *, drain: bool) -> None:
        """Follows the orchestrator: drains, or takes work again, and changes to a deployed model.

        Only a changed deployment changes the model. A repeated one does not undo what an operator
        did meanwhile.
        """
        if drain != (_ORCHESTRATOR in self._node.drains):
            log.info("drain requested", drain=drain)
            (self._node.drains.add if drain else self._node.drains.discard)(_ORCHESTRATOR)
            self._node.changed()
        switching = self._switch is not None and not self._switch.done()
        if deployment == self._deployment or switching:
            return
        self._deployment = deployment
        wanted = self._started_with if deployment is None else ModelChoice.at(deployment.path, deployment.model)
        if wanted is not None and wanted != self._node.host.choice:
            self._switch = self._node.background.once("change_over", self._change_over(wanted))

    async def _change_over(self, choice: ModelChoice) -> None:
        """Changes the model after running generations have finished.

        What outlives the grace fails over.
        """
        log.info("model change started", model=choice.name, path=choice.path)
        try:
            await self.drain(self._node.settings.drain_grace_s, MODEL_CHANGES)
            async with self._changing:
                await self._node.host.load(choice)
        except RyzansteinError as error:
            log.error("deployment refused", model=choice.name, reason=error.message)
        finally:
            self._node.drains.discard(MODEL_CHANGES)
            self._node.changed()

    def _require_idle(self) -> None:
        running = len(self._node.running)
        if running:
            raise errors.failed_precondition("GENERATIONS_RUN", f"{running} generations are running: drain the node first")
