"""One version of a model on this node: its text and ranks, and the generations that run on them.

A model is replaced by loading the next version beside the one that serves. What runs on the old
version ends there. So everything that belongs to a set of ranks is kept together here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import structlog

from ryzanstein import errors
from ryzanstein.cluster import Load, LoadProgress
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import AdapterRef, Attempt
from ryzanstein.observe.tracing import Tracing
from ryzanstein.worker.agent.adapters.files import AdaptedModel
from ryzanstein.worker.agent.adapters.node_adapters import NodeAdapters
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter
from ryzanstein.worker.agent.adapters.residency import AdapterLease, AdapterPacking, AdapterResidency
from ryzanstein.worker.agent.memory.lending import KvLending
from ryzanstein.worker.agent.model_host import ModelChoice, ModelHost, Serving
from ryzanstein.worker.agent.pages.model_pages import ModelPages
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.agent.versions.early_tokens import early_tokens
from ryzanstein.worker.agent.versions.generations import RunningGenerations
from ryzanstein.worker.agent.versions.profiling import Profiling
from ryzanstein.worker.agent.versions.vectors import RunningVectors
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice, SetTokens, StepEvents, SubmitGroup
from ryzanstein.worker.supervision.group import (
    STANDSTILLS,
    STARTING,
    EngineFactory,
    EngineGroup,
    EngineModel,
    GroupEvents,
    NewEngines,
    RankProgress,
    RankStep,
)
from ryzanstein.worker.supervision.messages import RankReady
from ryzanstein.worker.supervision.recovery import Rung
from ryzanstein.worker.telemetry import NO_STATS, WorkerTelemetry
from ryzanstein.worker.text.grammars.judge import ConstraintJudge
from ryzanstein.worker.text.templates.rendering import ChatRenderer
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

FAILED_ALONE = (errors.OUT_OF_MEMORY, errors.LOGITS_NOT_FINITE)


class ModelVersion:
    """A host of one model with what runs on it. Versions of one agent share its telemetry.

    `seen_bytes` is the private memory of the ranks, as last read.
    `adapters` are registered for the model, and `on_adapter` is called with the digest of one that comes into the ranks'
    memory or goes. `on_change` is called when the state changes.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        telemetry: WorkerTelemetry,
        tracing: Tracing,
        templates: ChatRenderer,
        *,
        new_engines: NewEngines,
        lending: KvLending,
        traffic: PageTraffic,
        constraints: ConstraintJudge,
        adapters: NodeAdapters,
        on_adapter: Callable[[bytes], None],
        on_change: Callable[[], None],
    ) -> None:
        self._settings, self._telemetry, self._lending = settings, telemetry, lending
        self._new_engines = new_engines
        self.stats = self._counted = NO_STATS
        self.seen_bytes = 0
        self._informed: EngineGroup | None = None
        self.profiling = Profiling()
        self.running = RunningGenerations(self._send, telemetry, tracing, self._lead, self._steps)
        self.vectors = RunningVectors(self._send)
        self.pages = ModelPages(settings, telemetry, traffic, lambda: self.num_running > 0)
        self._adapters = adapters
        packing = AdapterPacking(
            adapters.files.pack, telemetry.background.once, telemetry.adapters, adapters.registry.is_pinned
        )
        self.adapters = AdapterResidency(settings.adapter_bytes, packing, on_adapter)
        self._events = GroupEvents(
            self._on_step,
            self.profiling.on_trace,
            lambda: self.num_running > 0,
            self.pages.on_answer,
            telemetry.ranks.collectives.observe,
        )
        self._constraints, self._early_tokens = constraints, b""
        self.host = ModelHost(
            settings,
            self._engines,
            telemetry,
            on_change=on_change,
            on_text=self._read_tokens,
            on_ready=self._on_ready,
            on_gone=self._on_gone,
            on_freed=partial(lending.free, self),
            on_ended=self._on_ended,
            templates=templates,
        )

    @property
    def num_running(self) -> int:
        """The generations that run, and the inputs whose vectors are being computed."""
        return len(self.running) + len(self.vectors.waiting)

    @property
    def num_sequences(self) -> int:
        """The sequences that the engine has or will get."""
        return self.running.num_choices + len(self.vectors.waiting)

    async def idle(self) -> None:
        """Returns when nothing runs."""
        while self.num_running:
            await self.running.idle.wait()
            await self.vectors.idle.wait()

    @property
    def load(self) -> Load:
        """The load that the engine last reported, plus what was sent to it since."""
        announced, running = self.host.announced, self.stats.running
        if announced is None:
            return Load()
        waiting = max(self.stats.waiting, self.num_sequences - running)
        num_blocks = self.stats.block_limit or announced.num_blocks
        return Load(running, waiting, announced.max_sequences, self.stats.blocks_held, num_blocks)

    def progress(self) -> list[RankProgress]:
        """Returns what each rank does now; empty without ranks."""
        return [] if self.host.serving is None else list(self.host.serving.group.progress())

    def loading(self) -> LoadProgress | None:
        """Returns how far ranks are that are being started; None if none are. A server beside the node loads out of sight."""
        ranks = [] if self.host.starting is None else self.host.starting.progress()
        starting = [rank for rank in ranks if rank.phase in STARTING]
        if not starting:
            return None
        last = min(starting, key=lambda rank: STARTING.index(rank.phase))
        return LoadProgress(
            last.phase,
            sum(rank.loaded_bytes for rank in ranks),
            sum(rank.load_bytes for rank in ranks),
            sum(rank.packed_bytes for rank in ranks),
            sum(rank.pack_bytes for rank in ranks),
        )

    def sight(self) -> tuple[object, ...] | None:
        """Returns what differs whenever the start moves, of what the watchdog of starts goes by; None: that cannot be seen.

        Before the first rank there is none: kernels are compiled, which has time limits of its own. A server beside the node
        starts out of sight, within its own.
        """
        host, ranks = self.host, [] if self.host.starting is None else self.host.starting.progress()
        if host.starting is not None and not any(rank.pid and rank.phase in STARTING for rank in ranks):
            return None
        moves = tuple((rank.pid, rank.phase, rank.progress_s, rank.loaded_bytes, rank.packed_bytes) for rank in ranks)
        return host.choice, host.state, host.reason, moves

    @property
    def shared_kv_bytes(self) -> tuple[int, int]:
        """The memory of the KV cache that the model has from others of the node, and that others have of it."""
        return self._lending.borrowed_bytes(self), self._lending.lent_bytes(self)

    @property
    def step(self) -> int:
        """Engine steps of the present ranks so far."""
        lead = self._lead()
        return 0 if lead is None else lead.step

    def _lead(self) -> RankProgress | None:
        return next(iter(self.progress()), None)

    def _steps(self, step: int) -> Sequence[RankStep]:
        return [] if self.host.serving is None else self.host.serving.group.steps(step)

    @property
    def profiled(self) -> bool:
        """Whether a rank's profiler is starting or writing, or steps stand still for another known reason."""
        return any(rank.phase in STANDSTILLS for rank in self.progress())

    def text(self, attempt: Attempt) -> TextModel:
        """Returns the text side of the model for the attempt; its ranks serve or sleep.

        Raises UNAVAILABLE when another node should be tried.
        """
        text, node_id = self.host.text, self._settings.node_id
        if self.host.announced is None or text is None:
            raise self._not_ready()
        if attempt.request.model not in ("", text.name):
            message = f"node {node_id} serves {text.name!r}, not {attempt.request.model[:128]!r}"
            raise errors.unavailable("MODEL_NOT_SERVED", message)
        return text

    def serving(self) -> Serving:
        """Returns the ranks that serve. Raises UNAVAILABLE when there are none."""
        if self.host.serving is None:
            raise self._not_ready()
        return self.host.serving

    def _not_ready(self) -> RyzansteinError:
        return errors.unavailable("NODE_NOT_READY", f"node {self._settings.node_id}: {self.host.reason}")

    def tell_tokens(self, table: bytes) -> None:
        """Sends new ranks the model's table of tokens, once."""
        group = self.serving().group
        if self._informed is not group:
            group.send(SetTokens(table))
            self._informed = group

    def adapter(self, ref: AdapterRef) -> RegisteredAdapter:
        """Returns the adapter with this content. Raises UNAVAILABLE when another node should be tried."""
        if (found := self._adapters.registry.find(ref)) is None:
            message = f"node {self._settings.node_id} has no adapter {ref.name[:128]!r} with this content"
            raise errors.unavailable(errors.ADAPTER_NOT_SERVED, message)
        return found

    async def load_pinned(self) -> None:
        """Brings the pinned adapters into the ranks' memory. One for which there is no room is left out."""
        for adapter in [each for each in self._adapters.registry if each.pinned]:
            if self.adapters.has(adapter.ref.digest):
                continue
            try:
                (await self.adapters.lease(adapter)).release()
            except RyzansteinError as error:
                log.warning("pinned adapter not loaded", adapter=adapter.ref.name, reason=error.reason, message=error.message)

    async def lease(self, ref: AdapterRef | None) -> AdapterLease:
        """Returns a hold on an adapter when the ranks have it. Raises as `adapter` does, and ADAPTER_NO_ROOM."""
        if ref is None:
            return AdapterLease()
        adapter = self.adapter(ref)
        try:
            return await self.adapters.lease(adapter)
        except RyzansteinError as error:
            if error.reason != errors.ADAPTER_UNFIT:
                raise
            self._adapters.unserve(adapter, error.message)
            raise errors.unavailable(errors.ADAPTER_NOT_SERVED, error.message) from None

    async def _read_tokens(self, text: TextModel) -> None:
        self._early_tokens = await early_tokens(self._constraints, text)

    def count(self) -> None:
        """Adds to the metrics what the engine counted since the last call."""
        self._telemetry.count(self.stats, self._counted)
        self._counted = self.stats

    def show(self) -> None:
        """Shows in the metrics what this version's ranks do now."""
        self._telemetry.asleep.set(self.host.asleep)
        self._show_adapters()
        self._telemetry.engine(self.stats)
        self._telemetry.kv.lending(*self.shared_kv_bytes)
        if self.host.serving is not None:
            group = self.host.serving.group
            self._telemetry.ranks.progress(group.progress(), group.slowness())

    def _show_adapters(self) -> None:
        metrics, memory = self._telemetry.adapters, self.adapters
        metrics.registered.set(len(self._adapters.registry))
        metrics.refused.set(len(self._adapters.refused))
        metrics.resident.set(len(memory))
        metrics.bytes.set(memory.num_bytes)

    def _engines(self, choice: ModelChoice) -> EngineFactory:
        text = self.host.text
        if text is None:
            raise ValueError("an engine runs a model whose text side is there")
        return self._new_engines(
            EngineModel(choice.path, text.context_length, text.vocab_size, self._early_tokens), self._events
        )

    def _send(self, message: SubmitGroup | CancelGroup | FinishChoice) -> None:
        if self.host.serving is not None:
            self.host.serving.group.send(message)

    def _on_ready(self, group: EngineGroup, ranks: Sequence[RankReady]) -> None:
        """Takes ranks to which nothing was sent yet."""
        if self._early_tokens:
            self._informed = group
        self._lending.join(self, group, ranks)
        self.adapters.on_ready(group)
        if self.host.choice is not None:
            path = Path(self.host.choice.path)
            self.pages.on_ready(group, ranks, path)
            self._adapters.ready(AdaptedModel(path, ranks[0].adaptable, half=ranks[0].quantization != "none"))
            self._telemetry.background.once("pinned_adapters", self.load_pinned())

    def _on_step(self, events: StepEvents) -> None:
        self._note_recoveries(events)
        before, self.stats = self.stats, events.stats
        self._telemetry.step(events.stats, before)
        self.running.on_step(events)
        if self.vectors.waiting:
            self.vectors.on_step(events)
        self.pages.on_step(events, before)

    def _note_recoveries(self, events: StepEvents) -> None:
        """Counts the lower rungs of the recovery ladder, which the engine handles on its own."""
        retries = events.stats.memory_retries - self.stats.memory_retries
        if retries > 0:
            self._telemetry.recoveries.labels(Rung.RETRY_SMALLER.value).inc(retries)
            log.warning("step retried in smaller parts", retries=retries, rung=Rung.RETRY_SMALLER.value)
        failed = sum(failure.reason in FAILED_ALONE for failure in events.failed)
        if failed:
            self._telemetry.recoveries.labels(Rung.FAIL_REQUEST.value).inc(failed)

    def _on_ended(self) -> None:
        """Forgets ranks that have ended; nothing ran on them. New ranks count from zero."""
        self.stats = self._counted = NO_STATS
        self.seen_bytes = 0
        self.adapters.on_gone()
        self.pages.on_gone()
        self._lending.leave(self)
        self._telemetry.ranks.gone()

    def _on_gone(self, error: RyzansteinError, node_fault: bool) -> None:
        """Fails everything that ran on the lost ranks. New ranks count from zero."""
        self.stats = self._counted = NO_STATS
        self.adapters.on_gone()
        self.pages.on_gone()
        self._lending.lose(self)
        self._telemetry.ranks.gone()
        self.running.fail_all(error, node_fault=node_fault)
        self.vectors.fail_all(error)
        self.profiling.on_gone(error)
