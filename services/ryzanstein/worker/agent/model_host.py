"""The model that this node serves: its text side here, its ranks under a supervisor.

Loads and unloads it, and follows the loss and recovery of its ranks. There is one model at a time.
The node reads its state; `on_change` notifies of each change.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from ryzanstein import errors
from ryzanstein.backoff import Backoff
from ryzanstein.cluster import NO_MODEL, OWN_ENGINE, EngineTraits, NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.files.model_paths import model_location, model_name
from ryzanstein.process.spare_memory import trim
from ryzanstein.worker.config import MAX_PATH_CHARS, WorkerSettings
from ryzanstein.worker.engine.extents import SLOTS_OF_SEQUENCE
from ryzanstein.worker.supervision.autopsy import Autopsy
from ryzanstein.worker.supervision.group import EngineFactory, EngineGroup, RankLoss
from ryzanstein.worker.supervision.messages import RankReady
from ryzanstein.worker.supervision.recovery import Recovery, Rung
from ryzanstein.worker.supervision.supervisor import Supervisor
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.templates.rendering import ChatRenderer
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

MODEL_REPLACED = "MODEL_REPLACED"
UNSPAWNED = Backoff(1.0, 30.0, 60.0)
MAX_LOSSES = 16
MAX_AUTOPSIES = 5


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model: its name on the wire and its directory on this node.

    `revision` is that of its deployment; 0: no deployment named it.
    """

    name: str
    path: str
    revision: int = 0

    @classmethod
    def at(cls, path: str, name: str = "", revision: int = 0) -> ModelChoice:
        """Returns the model in a directory or GGUF file; see `model_name` for the default of the name.

        Raises INVALID_ARGUMENT for what is not a path.
        """
        if "\0" in path or len(path) > MAX_PATH_CHARS:
            raise errors.invalid("path", f"must have at most {MAX_PATH_CHARS} characters and no NUL")
        return cls(name or model_name(Path(path)), str(model_location(Path(path))), revision)


@dataclass(frozen=True, slots=True)
class Serving:
    """Ranks that are ready. `context_length` is how much of the model's context they can hold.

    `numerics` says how they compute, see `Numerics`; `engine` what computes, and what it cannot do.
    """

    group: EngineGroup
    context_length: int
    num_blocks: int
    max_sequences: int
    numerics: str = ""
    engine: EngineTraits = OWN_ENGINE


class ModelHost:
    """A `RankListener` that holds the model.

    `serving` is None unless ranks are ready; `text` outlives their loss. A model that sleeps has no
    ranks, but its state is READY. Call `wake` before sending work to it.

    `on_text` is called with the text side of a model that is being loaded, before its ranks start.
    `on_ready` is called with new ranks before anything is sent to them, `on_freed` when lost ranks
    have ended that are to return, and `on_ended` when ranks have ended that are not. `on_gone` is
    called with the reason why everything that ran is gone, and whether that is the node's fault.
    `recent_losses` carry the Unix time in seconds at which the ranks were lost; `autopsies` say of the
    last ones what all ranks did.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engines_of: Callable[[ModelChoice], EngineFactory],
        telemetry: WorkerTelemetry,
        *,
        on_change: Callable[[], None],
        on_text: Callable[[TextModel], Awaitable[None]],
        on_ready: Callable[[EngineGroup, Sequence[RankReady]], None],
        on_freed: Callable[[], None],
        on_ended: Callable[[], None],
        on_gone: Callable[[RyzansteinError, bool], None],
        templates: ChatRenderer,
    ) -> None:
        self._settings, self._engines_of, self._telemetry = settings, engines_of, telemetry
        self._log = log.bind(node_id=settings.node_id)
        self._on_change, self._on_text, self._on_gone = on_change, on_text, on_gone
        self._on_ready, self._on_freed, self._on_ended = on_ready, on_freed, on_ended
        self._templates = templates
        self._supervisor: Supervisor | None = None
        self._engines: EngineFactory | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._changes = asyncio.Event()
        self._slept: Serving | None = None
        self._waking: asyncio.Task[None] | None = None
        self.state = NodeState.STARTING
        self.reason = NO_MODEL
        self.choice: ModelChoice | None = None
        self.text: TextModel | None = None
        self.serving: Serving | None = None
        self._content = ""
        self.losses = 0
        self.recent_losses: deque[tuple[float, RankLoss]] = deque(maxlen=MAX_LOSSES)
        self.autopsies: deque[Autopsy] = deque(maxlen=MAX_AUTOPSIES)

    def expect(self, choice: ModelChoice) -> None:
        """Reports that a model is about to be loaded."""
        self._become(NodeState.STARTING, f"loading {choice.name}")

    async def load(self, choice: ModelChoice) -> None:
        """Replaces the model; returns when its ranks are being started. One call at a time.

        Raises FAILED_PRECONDITION naming the file when the model cannot be read. The state reflects
        whatever ends the call early: after a failure it is FAILED, after a cancellation it is as
        after `unload`.
        """
        await self._unload(f"loading {choice.name}")
        self.choice = choice
        self.expect(choice)
        try:
            calling = (self._settings.call_format, self._settings.reasoning)
            template_file = self._settings.template_file(choice.name)
            defaults = self._settings.generation_config == "auto"
            load = partial(TextModel.load, choice.path, choice.name, calling, template_file, defaults=defaults)
            self.text = await asyncio.to_thread(load)
            await asyncio.to_thread(trim)  # reading a vocabulary leaves more free memory than it keeps
            if self.text.template is not None and not self.text.calling.native:
                self._log.info("chat template knows no tools", call_format=self.text.calling.family)
            await self._on_text(self.text)
            self._supervise(choice)
            await self._check_template(self.text)
        except asyncio.CancelledError:
            await self.unload()
            raise
        except Exception as error:
            await self.unload()
            self.choice = choice
            self._become(NodeState.FAILED, str(error) if isinstance(error, RyzansteinError) else repr(error))
            raise

    async def _check_template(self, text: TextModel) -> None:
        """Compiles the chat templates, if there are any. Raises FAILED_PRECONDITION that names the file of an operator's."""
        try:
            for template in {id(each): each for each in (text.tool_template, text.template) if each is not None}.values():
                await self._templates.check(template)
        except RyzansteinError as error:
            where = "" if text.template_file is None else f"{text.template_file}: "
            raise replace(error, message=f"{where}{error.message}") from None

    def _supervise(self, choice: ModelChoice) -> None:
        self._engines = self._engines or self._engines_of(choice)
        self._supervisor = Supervisor(self._engines, self._settings.tuning.recovery, self, self._log)
        run, background = self._supervisor.run, self._telemetry.background
        self._supervision = background.supervise("ranks", run, UNSPAWNED, finite=True, on_end=self._on_unsupervised)

    async def unload(self) -> None:
        """Ends the ranks and drops the model; returns when their memory is free."""
        await self._unload(NO_MODEL)

    async def _unload(self, reason: str) -> None:
        # First: ranks that are ending must not be visible, whether or not the caller waits for
        # their end.
        self.serving = self.choice = self.text = self._supervisor = self._slept = None
        self._content = ""
        self._become(NodeState.STARTING, reason)
        try:
            await self._end_ranks()
            if (engines := self._engines) is not None:
                await engines.close()  # before it is forgotten: when this is cancelled, the next unload ends it
                self._engines = None
        finally:
            self._on_gone(errors.unavailable("MODEL_UNLOADED", "the node's model was unloaded"), False)

    @property
    def starting(self) -> EngineGroup | None:
        """The ranks that are being started."""
        return None if self._supervisor is None else self._supervisor.starting

    @property
    def announced(self) -> Serving | None:
        """The ranks that serve; of a model that sleeps, those that did."""
        return self.serving or self._slept

    @property
    def condemned(self) -> bool:
        """Whether the engine cannot recover by itself and must be restarted from outside; see `EngineFactory`."""
        return self._engines is not None and self._engines.condemned

    @property
    def asleep(self) -> bool:
        """Whether there are no ranks because nothing ran; also while they are being started."""
        return self._slept is not None

    @property
    def waking(self) -> bool:
        """Whether the ranks of a model that slept are being started."""
        return self._waking is not None and not self._waking.done()

    async def sleep(self) -> None:
        """Ends the ranks of a model on which nothing runs; returns when their memory is free."""
        if self.serving is None:
            return
        self._slept, self.serving = self.serving, None
        if self._supervisor is not None:
            self._supervisor.sleeps = True
        self._supervisor = None
        self._log.info("model put to sleep")
        self._on_change()
        await self._end_ranks()

    async def wake(self) -> None:
        """Starts the ranks of a model that sleeps; returns when they serve, or have failed to.

        Calls at the same time wait for the same start. It goes on when a caller is cancelled.
        """
        if self._slept is None:
            return
        if self._waking is None or not self.waking:
            self._waking = self._telemetry.background.once("wake", self._wake())
        await asyncio.shield(self._waking)

    async def _wake(self) -> None:
        choice, began_s = self.choice, time.monotonic()
        await self._end_ranks()  # of a model that is only just going to sleep
        if choice is None or self.choice != choice:
            return
        self._supervise(choice)
        while self._slept is not None and self.choice == choice:
            await self._changes.wait()
        self._log.info("model woken", state=self.state.name, after_s=round(time.monotonic() - began_s, 3))

    async def _end_ranks(self) -> None:
        if (supervision := self._supervision) is None:
            return
        if not supervision.cancelling():
            supervision.cancel()
        await asyncio.wait([supervision])
        if self._supervision is supervision:
            self._supervision = None
            self._on_ended()

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
        if self._content not in ("", ranks[0].content):
            self._telemetry.background.once("changed_files", self._refuse_changed())
            return
        self._content = ranks[0].content
        self._telemetry.ranks_ready(ranks)
        self._on_ready(group, ranks)
        self._slept = None
        lead = ranks[0]
        engine = EngineTraits(lead.engine, frozenset(lead.unsupported), lead.continues_exactly)
        self.serving = Serving(group, lead.context_length, lead.num_blocks, lead.max_sequences, lead.numerics, engine)
        phases = {f"rank_{answer.rank}": answer.startup_phases for answer in ranks}
        sizes = {"num_blocks": lead.num_blocks, "context_length": lead.context_length}
        if lead.num_states:
            sizes |= {"num_states": lead.num_states, "state_bytes": sum(rank.state_bytes for rank in ranks)}
        kernels = lead.kernels or "torch's operators"
        self._log.info("ranks ready", tp=len(ranks), **sizes, quantization=lead.quantization, kernels=kernels, **phases)
        self._tell_limits(ranks)
        self._become(NodeState.READY, "")

    def _tell_limits(self, ranks: Sequence[RankReady]) -> None:
        """Logs what is not as it was set, or could be better."""
        lead = ranks[0]
        if lead.divergence is not None:
            self._log.info("quantization chosen", quantization=lead.quantization, int8_divergence=round(lead.divergence, 6))
        if lead.context_bytes:
            advice = f"set kv_bytes to {lead.context_bytes} for all of the model's context"
            self._log.warning("context cut by the KV cache", context_length=lead.context_length, advice=advice)
        if lead.max_sequences < self._settings.max_sequences:
            advice = f"set tuning.kv_states to {SLOTS_OF_SEQUENCE * self._settings.max_sequences}, or a larger kv_bytes"
            self._log.warning("fewer sequences run at once", max_sequences=lead.max_sequences, advice=advice)
        if lead.without_compression:
            self._log.warning("keys and values are not compressed", reason=lead.without_compression)
        if any(answer.num_unpacked for answer in ranks):
            reason = "a rank's columns of them are not whole blocks: with fewer ranks they take less memory"
            self._log.warning("matrices kept as floats", number=[answer.num_unpacked for answer in ranks], reason=reason)
        if lead.without_native and not lead.without_kernels:
            layers = round(lead.native_layers, 3)
            self._log.info("layers run outside of the native step", native_layers=layers, reason=lead.without_native)
        if lead.without_kernels:
            self._log.warning("native kernels unavailable", reason=lead.without_kernels)
        if lead.company_matters:
            self._log.warning("outputs depend on batch composition", reason=lead.company_matters)

    async def _refuse_changed(self) -> None:
        """Ends ranks that came back with other files than those that the text side and earlier answers are of."""
        assert self.choice is not None
        where, remedy = f"{self.choice.path}: the files changed", "deploy it with --reload, or restart the node"
        self._supervisor = None
        await self._end_ranks()
        self.on_failed(f"{where} after the model was loaded: {remedy}")
        self._on_gone(errors.unavailable("NODE_NOT_READY", self.reason), True)

    def revive(self) -> None:
        """Ends a quarantine, or a drain caused by the node's own losses, at once."""
        if self._supervisor is not None:
            self._supervisor.revive()

    def on_lost(self, loss: RankLoss, recovery: Recovery) -> None:
        self._telemetry.ranks.lost(loss)
        self._telemetry.recoveries.labels(recovery.rung.value).inc()
        self.serving = self._slept = None
        self.losses += 1
        self.recent_losses.append((time.time(), loss))
        recovers = recovery.rung is Rung.RESTART_RANKS
        self._become(NodeState.RECOVERING if recovers else NodeState.FAILED, recovery.reason)
        error = RyzansteinError(loss.message, Code.UNAVAILABLE, loss.cause.value, {"rank": str(loss.rank)})
        self._on_gone(error, True)

    def on_examined(self, autopsy: Autopsy) -> None:
        self.autopsies.append(autopsy)

    def on_ended(self) -> None:
        self._on_freed()

    def on_failed(self, reason: str) -> None:
        self._slept = None
        self._become(NodeState.FAILED, reason)

    def _on_unsupervised(self, error: Exception) -> None:
        """Reports that the supervisor failed; it is started again later.

        The cause: no rank could even be spawned (no descriptors, no memory), or a bug.
        """
        self.serving = None
        self.on_failed(f"{type(error).__name__}: {error}")
        self._on_gone(errors.unavailable("NODE_NOT_READY", f"the supervisor of the ranks failed: {self.reason}"), True)
        self._on_freed()

    def _become(self, state: NodeState, reason: str) -> None:
        self.state, self.reason = state, reason
        self._changes.set()
        self._changes = asyncio.Event()
        self._log.info("state", state=state.name, reason=reason)
        self._on_change()
