"""The model that this node serves: its text side here, its ranks under a supervisor. Load, unload, lose, recover.

One model at a time. The node asks for its state; whoever waits for a change is told by `on_change`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

import structlog

from ryzanstein import errors
from ryzanstein.cluster import NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.ranks.group import GroupEvents, RankGroup, RankLoss
from ryzanstein.worker.ranks.messages import RankReady
from ryzanstein.worker.ranks.recovery import Recovery, Rung
from ryzanstein.worker.ranks.supervisor import Supervisor
from ryzanstein.worker.telemetry import Telemetry
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

NO_MODEL = "no model is loaded"
MAX_LOSSES = 16


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model by its name on the wire and its directory on this node."""

    name: str
    path: str

    @classmethod
    def at(cls, path: str, name: str = "") -> ModelChoice:
        """The name is by default the directory's."""
        directory = Path(path).resolve()
        return cls(name or directory.name, str(directory))


@dataclass(frozen=True, slots=True)
class Serving:
    """Ready ranks. `context_length` is what they can hold of the model's own."""

    group: RankGroup
    context_length: int
    num_blocks: int
    max_sequences: int


class ModelHost:
    """A `RankListener`. `serving` is None unless ranks are ready; `text` outlives their loss.

    `on_gone` hears why everything that ran is gone, and whether that is the node's fault. `recent_losses` come with the Unix
    seconds at which the ranks were lost.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        events: GroupEvents,
        telemetry: Telemetry,
        *,
        on_change: Callable[[], None],
        on_gone: Callable[[RyzansteinError, bool], None],
    ) -> None:
        self._settings, self._events, self._telemetry = settings, events, telemetry
        self._on_change, self._on_gone = on_change, on_gone
        self._supervisor: Supervisor | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self.state = NodeState.STARTING
        self.reason = NO_MODEL
        self.choice: ModelChoice | None = None
        self.text: TextModel | None = None
        self.serving: Serving | None = None
        self.losses = 0
        self.recent_losses: deque[tuple[float, RankLoss]] = deque(maxlen=MAX_LOSSES)

    async def load(self, choice: ModelChoice) -> None:
        """Replaces the model; returns when its ranks start. FAILED_PRECONDITION naming the file when it cannot be read."""
        await self.unload()
        self.choice = choice
        self._become(NodeState.STARTING, f"loads {choice.name}")
        try:
            self.text = await asyncio.to_thread(TextModel.load, choice.path, choice.name)
        except RyzansteinError as error:
            self._become(NodeState.FAILED, error.message)
            raise
        spec = self._settings.rank_spec(choice.path)
        self._supervisor = Supervisor(spec, self._settings.group_bounds(), self._settings.recovery(), self, self._events)
        # A context of its own: it outlives the call that asked for it, whose request id must not stand on its log lines.
        self._supervision = asyncio.create_task(self._supervisor.run(), context=Context())
        self._supervision.add_done_callback(self._on_unsupervised)

    async def unload(self) -> None:
        """Ends the ranks and forgets the model. Returns when their memory is free."""
        self.serving = None  # first: nobody may look at ranks that are ending
        self._become(NodeState.STARTING, NO_MODEL)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision])
            self._supervision = self._supervisor = None
        self.choice = self.text = self.serving = None
        self._on_gone(errors.unavailable("MODEL_UNLOADED", "the node's model was unloaded"), False)

    async def settled(self) -> None:
        """Returns when the ranks are ready. FAILED_PRECONDITION: the model cannot be served."""
        await self._settled.wait()
        if self.state is NodeState.FAILED:
            raise errors.failed_precondition("MODEL_REFUSED", self.reason)

    def on_ready(self, group: RankGroup, ranks: Sequence[RankReady]) -> None:
        self._telemetry.ranks_ready(ranks)
        lead = ranks[0]
        self.serving = Serving(group, lead.context_length, lead.num_blocks, lead.max_sequences)
        phases = {f"rank_{answer.rank}": answer.startup_phases for answer in ranks}
        log.info("ranks ready", tp=len(ranks), num_blocks=lead.num_blocks, context_length=lead.context_length, **phases)
        if lead.without_kernels:
            log.warning("no kernels of our own", reason=lead.without_kernels)
        self._become(NodeState.READY, "")

    def revive(self) -> None:
        """Ends a quarantine, or a drain that the node's own losses led to, now."""
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

    def _on_unsupervised(self, supervision: asyncio.Task[None]) -> None:
        """No rank could even be spawned (no descriptors, no memory): nothing is retried in this process."""
        if not supervision.cancelled() and (error := supervision.exception()) is not None:
            log.error("supervision failed", error=repr(error))
            self.on_failed(f"{type(error).__name__}: {error}")

    def _become(self, state: NodeState, reason: str) -> None:
        self.state, self.reason = state, reason
        if state in (NodeState.READY, NodeState.FAILED):
            self._settled.set()
        else:
            self._settled.clear()
        log.info("state", state=state.name, reason=reason)
        self._on_change()
