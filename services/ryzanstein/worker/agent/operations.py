"""What operators and the orchestrator do to one model of a node: change it, drain, profile, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO

import structlog

from ryzanstein import errors
from ryzanstein.cluster import MODEL_CHANGES, LoadProgress, NodeState
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.agent.model_host import MODEL_REPLACED, ModelChoice
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.agent.versions.profiling import too_large

log = structlog.get_logger(__name__)

MAX_PROFILE_STEPS = 100
DEFAULT_PROFILE_STEPS = 10
MAX_UNARY_TRACE_BYTES = 15 * 2**20
_OPERATOR, _ORCHESTRATOR = "requested by an operator", "requested by the orchestrator"


def _not_loading() -> None:
    """Returns that nothing is being loaded."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """The next version of a model: it is being loaded, or was refused for a reason.

    `loading` says how far it is, `sight` what is seen of its start; see `ModelVersion.sight`.
    """

    choice: ModelChoice
    state: NodeState = NodeState.STARTING
    reason: str = ""
    loading: Callable[[], LoadProgress | None] = _not_loading
    sight: Callable[[], tuple[object, ...] | None] = _not_loading


class Operations:
    """Operations on one agent, one instance per agent."""

    def __init__(self, node: NodeAgent) -> None:
        self._node = node
        self._changing = asyncio.Lock()
        self.replacement: Replacement | None = None

    async def load(self, choice: ModelChoice) -> None:
        """Loads a model; returns when it is ready.

        Raises FAILED_PRECONDITION while generations run, when the model is refused, or when another
        model replaces it meanwhile. Once the load has begun, it goes on when the caller is
        cancelled: the node's state shows how it ends.
        """
        self._require_idle()
        await self._change("load_model", lambda: self._node.host.load(choice))
        await self._node.host.settled(choice)

    async def load_first(self, choice: ModelChoice) -> None:
        """Loads the model that the node was started with, as `load` does.

        An operator may replace it meanwhile without an error.
        """
        try:
            await self.load(choice)
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

        It returns when all have ended and their conversations' pages are with the nodes that go on
        with them, or the grace has passed. Cancelling it changes nothing: the
        node drains until `undrain`.
        """
        self._node.drains.add(reason)
        self._node.changed()
        log.info("drain started", reason=reason, running=self._node.num_running, grace_s=grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self._node.versions.idle()
                await self._node.versions.hand_over()
        except TimeoutError:
            log.warning("drain grace period expired", running=self._node.num_running)
        return self._node.num_running

    def undrain(self) -> None:
        """Takes generations again, unless the orchestrator drains the node.

        Ranks in quarantine are started now.
        """
        self._node.drains.discard(_OPERATOR)
        self._node.host.revive()
        self._node.changed()
        log.info("undrain requested")

    def follow_drain(self, drain: bool) -> None:
        """Drains, or takes work again, as the orchestrator requests."""
        if drain != (_ORCHESTRATOR in self._node.drains):
            log.info("drain requested", drain=drain)
            (self._node.drains.add if drain else self._node.drains.discard)(_ORCHESTRATOR)
            self._node.changed()
            if drain:
                self._node.background.once("hand_over", self._hand_over())

    async def _hand_over(self) -> None:
        """Hands over the pages of conversations as soon as nothing runs."""
        await self._node.versions.idle()
        await self._node.versions.hand_over()

    async def profile(self, rank: int, steps: int) -> bytes:
        """Returns a Chrome trace of the rank's next steps; see `profiles`."""
        async with self.profiles("rank", [rank], steps) as files:
            trace = files[rank].read(MAX_UNARY_TRACE_BYTES + 1)
        if len(trace) > MAX_UNARY_TRACE_BYTES:
            raise too_large()
        return trace

    def profiles(self, field: str, ranks: Sequence[int], steps: int) -> AbstractAsyncContextManager[dict[int, BinaryIO]]:
        """Yields files with Chrome traces of the next steps of these ranks, or of all of them.

        Raises INVALID_ARGUMENT, with `field` for a rank, FAILED_PRECONDITION while another profile is recorded, or
        DEADLINE_EXCEEDED when the node has nothing to do.
        """
        node = self._node
        for rank in ranks:
            if rank >= node.settings.tp:
                raise errors.invalid(field, f"must be less than {node.settings.tp}", rank)
        if steps > MAX_PROFILE_STEPS:
            raise errors.invalid("steps", f"must be at most {MAX_PROFILE_STEPS}", steps)
        if node.host.serving is None:
            raise errors.failed_precondition("NODE_NOT_READY", node.host.reason or "the model sleeps")
        wanted = sorted(set(ranks)) or range(node.settings.tp)
        return node.version.profiling.recorded(node.host.serving.group, wanted, steps or DEFAULT_PROFILE_STEPS)

    async def change_over(self, choice: ModelChoice) -> None:
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

    async def replace(self, choice: ModelChoice) -> bool:
        """Loads a version of the model beside the one that serves, then serves by it.

        New generations go to the new version as soon as it is ready; running ones may end on the
        old one within the drain grace, and the rest fails over. Returns False when the new version
        is refused: the old one goes on.
        """
        log.info("model replacement started", model=choice.name, path=choice.path, revision=choice.revision)
        async with self._changing:
            version = self._node.versions.new()
            self.replacement = Replacement(choice, loading=version.loading, sight=version.sight)
            try:
                await version.host.load(choice)
                await version.host.settled(choice)
            except RyzansteinError as error:
                await version.host.unload()
                log.error("deployment refused", model=choice.name, reason=error.message)
                self.report_refusal(choice, error.message)
                return False
            except BaseException:
                await version.host.unload()
                raise
            self.replacement = None
            await self._node.versions.switch(version, self._node.settings.drain_grace_s)
        return True

    async def refusal(self, choice: ModelChoice) -> str:
        """Returns why the model that is being loaded cannot be served, when that is known; empty if it is."""
        host = self._node.host
        try:
            await host.settled(choice)
        except RyzansteinError as error:
            return error.message if host.state is NodeState.FAILED else ""
        return ""

    def report_refusal(self, choice: ModelChoice, reason: str) -> None:
        """Reports that a version was refused and the one before it serves."""
        self.replacement = Replacement(choice, NodeState.FAILED, reason)

    def forget_refusal(self) -> None:
        """Reports no longer that a version was refused."""
        if self.replacement is not None and self.replacement.state is NodeState.FAILED:
            self.replacement = None

    async def retire(self) -> None:
        """Unloads the model for good, after running generations have finished."""
        log.info("model retires", node_id=self._node.settings.node_id)
        try:
            await self.drain(self._node.settings.drain_grace_s, MODEL_CHANGES)
            async with self._changing:
                await self._node.versions.unload()
                await self._node.lending.settled()
        finally:
            self._node.drains.discard(MODEL_CHANGES)
            self.replacement = None
            self._node.changed()

    def _require_idle(self) -> None:
        running = self._node.num_running
        if running:
            raise errors.failed_precondition("GENERATIONS_RUN", f"{running} generations are running: drain the node first")
