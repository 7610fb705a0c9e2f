"""The model that this node serves: its text side here, its ranks under a supervisor.

Loads and unloads it, and follows the loss and recovery of its ranks. There is one model at a time.
The node reads its state; `on_change` notifies of each change.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from ryzanstein import errors
from ryzanstein.backoff import Backoff
from ryzanstein.cluster import NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engines.group import EngineFactory, EngineGroup, RankLoss
from ryzanstein.worker.engines.messages import RankReady
from ryzanstein.worker.engines.recovery import Recovery, Rung
from ryzanstein.worker.engines.supervisor import Supervisor
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.templates.rendering import ChatRenderer
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

MODEL_REPLACED = "MODEL_REPLACED"
NO_MODEL = "no model is loaded"
UNSPAWNED = Backoff(1.0, 30.0, 60.0)
MAX_LOSSES = 16
MAX_PATH_CHARS = 1024


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model: its name on the wire and its directory on this node."""

    name: str
    path: str

    @classmethod
    def at(cls, path: str, name: str = "") -> ModelChoice:
        """Returns the model in a directory; the name defaults to the directory's.

        Raises INVALID_ARGUMENT for what is not a path.
        """
        if "\0" in path or len(path) > MAX_PATH_CHARS:
            raise errors.invalid("path", f"must have at most {MAX_PATH_CHARS} characters and no NUL")
        directory = Path(path).resolve()
        return cls(name or directory.name, str(directory))


@dataclass(frozen=True, slots=True)
class Serving:
    """Ranks that are ready. `context_length` is how much of the model's context they can hold."""

    group: EngineGroup
    context_length: int
    num_blocks: int
    max_sequences: int


NewEngines = Callable[[ModelChoice], EngineFactory]
"""Returns what starts and restarts the engine group of a model."""


class ModelHost:
    """A `RankListener` that holds the model.

    `serving` is None unless ranks are ready; `text` outlives their loss.

    `on_gone` is called with the reason why everything that ran is gone, and whether that is the
    node's fault. `recent_losses` carry the Unix time in seconds at which the ranks were lost.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        new_engines: NewEngines,
        telemetry: WorkerTelemetry,
        *,
        on_change: Callable[[], None],
        on_gone: Callable[[RyzansteinError, bool], None],
        templates: ChatRenderer,
    ) -> None:
        self._settings, self._new_engines, self._telemetry = settings, new_engines, telemetry
        self._on_change, self._on_gone = on_change, on_gone
        self._templates = templates
        self._supervisor: Supervisor | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._changes = asyncio.Event()
        self.state = NodeState.STARTING
        self.reason = NO_MODEL
        self.choice: ModelChoice | None = None
        self.text: TextModel | None = None
        self.serving: Serving | None = None
        self.losses = 0
        self.recent_losses: deque[tuple[float, RankLoss]] = deque(maxlen=MAX_LOSSES)

    async def load(self, choice: ModelChoice) -> None:
        """Replaces the model; returns when its ranks are being started. One call at a time.

        Raises FAILED_PRECONDITION naming the file when the model cannot be read. The state reflects
        whatever ends the call early: after a failure it is FAILED, after a cancellation it is as
        after `unload`.
        """
        await self.unload()
        self.choice = choice
        self._become(NodeState.STARTING, f"loading {choice.name}")
        try:
            self.text = await asyncio.to_thread(TextModel.load, choice.path, choice.name)
            self._supervise(choice)
            if self.text.template is not None:
                await self._templates.check(self.text.template)
        except asyncio.CancelledError:
            await self.unload()
            raise
        except Exception as error:
            await self.unload()
            self.choice = choice
            self._become(NodeState.FAILED, str(error) if isinstance(error, RyzansteinError) else repr(error))
            raise

    def _supervise(self, choice: ModelChoice) -> None:
        self._supervisor = Supervisor(self._new_engines(choice), self._settings.recovery(), self)
        run, background = self._supervisor.run, self._telemetry.background
        self._supervision = background.supervise("ranks", run, UNSPAWNED, finite=True, on_end=self._on_unsupervised)

    async def unload(self) -> None:
        """Ends the ranks and drops the model; returns when their memory is free."""
        # First: ranks that are ending must not be visible, whether or not the caller waits for
        # their end.
        self.serving = self.choice = self.text = self._supervisor = None
        self._become(NodeState.STARTING, NO_MODEL)
        try:
            if (supervision := self._supervision) is not None:
                supervision.cancel()
                await asyncio.wait([supervision])
                self._supervision = None
        finally:
            self._on_gone(errors.unavailable("MODEL_UNLOADED", "the node's model was unloaded"), False)

    async def settled(self, choice: ModelChoice) -> None:
        """Returns when this model's ranks are ready.

        Raises FAILED_PRECONDITION when it cannot be served or is no longer the node's model.
        """
        while self.choice == choice and self.state not in (NodeState.READY, NodeState.FAILED):
            await self._changes.wait()
        if self.choice != choice:
            raise errors.failed_precondition(MODEL_REPLACED, f"model {choice.name} was unloaded or replaced while loading")
        if self.state is NodeState.FAILED:
            raise errors.failed_precondition("MODEL_REFUSED", self.reason)

    def on_ready(self, group: EngineGroup, ranks: Sequence[RankReady]) -> None:
        self._telemetry.ranks_ready(ranks)
        lead = ranks[0]
        self.serving = Serving(group, lead.context_length, lead.num_blocks, lead.max_sequences)
        phases = {f"rank_{answer.rank}": answer.startup_phases for answer in ranks}
        sizes = {"num_blocks": lead.num_blocks, "context_length": lead.context_length}
        log.info("ranks ready", tp=len(ranks), **sizes, kernels=lead.kernels or "torch's operators", **phases)
        if lead.without_kernels:
            log.warning("native kernels unavailable", reason=lead.without_kernels)
        if lead.company_matters:
            log.warning("outputs depend on batch composition", reason=lead.company_matters)
        self._become(NodeState.READY, "")

    def revive(self) -> None:
        """Ends a quarantine, or a drain caused by the node's own losses, at once."""
        if self._supervisor is not None:
            self._supervisor.revive()

    def on_lost(self, loss: RankLoss, recovery: Recovery) -> None:
        self._telemetry.rank_losses.labels(loss.cause.value.lower(), str(loss.rank)).inc()
        self._telemetry.recoveries.labels(recovery.rung.value).inc()
        self.serving = None
        self.losses += 1
        self.recent_losses.append((time.time(), loss))
        recovers = recovery.rung is Rung.RESTART_RANKS
        self._become(NodeState.RECOVERING if recovers else NodeState.FAILED, recovery.reason)
        error = RyzansteinError(loss.message, Code.UNAVAILABLE, loss.cause.value, {"rank": str(loss.rank)})
        self._on_gone(error, True)

    def on_failed(self, reason: str) -> None:
        self._become(NodeState.FAILED, reason)

    def _on_unsupervised(self, error: Exception) -> None:
        """Reports that the supervisor failed; it is started again later.

        The cause: no rank could even be spawned (no descriptors, no memory), or a bug.
        """
        self.serving = None
        self.on_failed(f"{type(error).__name__}: {error}")
        self._on_gone(errors.unavailable("NODE_NOT_READY", f"the supervisor of the ranks failed: {self.reason}"), True)

    def _become(self, state: NodeState, reason: str) -> None:
        self.state, self.reason = state, reason
        self._changes.set()
        self._changes = asyncio.Event()
        log.info("state", state=state.name, reason=reason)
        self._on_change()
