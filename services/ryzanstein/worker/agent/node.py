"""The core of an agent: links to routers on one side, ranks on the other, and the state of a model.

A token's path: StepEvents from rank 0, `RunningGenerations` (text), the router's link, all in one
call in the event loop. The beat is sent by the same loop, so a frozen agent sends none. This module
knows neither gRPC servicers nor the orchestrator.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial
from itertools import count
from typing import Protocol

import structlog

from ryzanstein import errors
from ryzanstein.adapters import AdapterReport
from ryzanstein.cluster import OWN_ENGINE, Beat, NodeState, Numerics
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Prompt
from ryzanstein.generation.request import NO_DEFAULTS
from ryzanstein.observe.tracing import Tracing
from ryzanstein.process.awake import AwakeClock
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.adapters import report_to_wire
from ryzanstein.worker.agent import intake
from ryzanstein.worker.agent.adapters.node_adapters import NodeAdapters
from ryzanstein.worker.agent.idleness import Idleness
from ryzanstein.worker.agent.memory.lending import KvLending
from ryzanstein.worker.agent.model_host import ModelHost
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.agent.submission import Submissions
from ryzanstein.worker.agent.versions.model_versions import ModelVersions
from ryzanstein.worker.agent.versions.version import ModelVersion
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.supervision.group import NewEngines
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.grammars.judge import ConstraintJudge, NoJudge
from ryzanstein.worker.text.templates.rendering import ChatRenderer
from ryzanstein.worker.text.tokenizer import TextModel
from ryzanstein.worker.tuning import LinkBounds

log = structlog.get_logger(__name__)

MAX_LINKS = 1024


class RouterLinks:
    """Opens and closes links. What a router submitted ends with its link."""

    def __init__(self, bounds: LinkBounds, versions: ModelVersions, telemetry: WorkerTelemetry) -> None:
        self._bounds, self._versions, self._telemetry = bounds, versions, telemetry
        self._links: list[RouterLink] = []

    def open(self, router_id: str, quiet_s: float = 0.0) -> RouterLink:
        """Returns a link for the router, see `RouterLink`. Release it with `close`.

        Raises RESOURCE_EXHAUSTED when too many routers are connected.
        """
        if len(self._links) >= MAX_LINKS:
            raise RyzansteinError(f"too many routers, the limit is {MAX_LINKS}", Code.RESOURCE_EXHAUSTED, "TOO_MANY_LINKS")
        link = RouterLink(router_id, self._bounds, quiet_s)
        self._links.append(link)
        self._telemetry.links.set(len(self._links))
        log.info("router connected", router_id=router_id)
        return link

    def close(self, link: RouterLink) -> None:
        """Cancels what the router submitted and releases the link."""
        for version in self._versions:
            version.running.close_link(link)
        self._links.remove(link)
        if link.overflowed:
            self._telemetry.link_overflows.inc()
        self._telemetry.links.set(len(self._links))
        log.info("router disconnected", router_id=link.router_id, overflowed=link.overflowed)

    def end(self) -> None:
        """Ends all links because the agent stops; the routers fail over what still runs.

        The ends of the last generations are sent before that.
        """
        for link in self._links:
            link.end()

    def report(self, adapters: worker.NodeAdapters) -> None:
        """Sends to all routers what adapters there are, or which have changed."""
        for link in self._links:
            link.report(adapters)

    def beat(self, beat: Beat) -> None:
        """Sends a beat to all routers."""
        for link in self._links:
            link.beat(beat)


_MEMORY_EVERY_BEATS = 4  # read from files, so not with every beat


class Health(Protocol):
    """Where readiness is reported: the RpcServer."""

    async def set_ready(self, ready: bool) -> None: ...

    async def set_started(self) -> None: ...

    async def set_engine(self, sound: bool) -> None:
        """Reports whether the node's inference server is sound. False asks its supervisor to restart it."""
        ...


class NodeAgent:
    """The core of an agent, one per model of a node.

    `versions`: it serves one version of its model at a time; what still runs on an earlier one ends
    there. `new_engines` chooses their engine. `drains` holds the reasons for
    which new generations are refused; empty means none. `other_models` are the names of the models
    of the node's other agents, for its beats.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        telemetry: WorkerTelemetry,
        tracing: Tracing,
        templates: ChatRenderer,
        *,
        new_engines: NewEngines,
        lending: KvLending | None = None,
        traffic: PageTraffic | None = None,
        constraints: ConstraintJudge | None = None,
    ) -> None:
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.drains: set[str] = set()
        self.other_models: tuple[str, ...] = ()
        self.constraints: ConstraintJudge = constraints or NoJudge()
        self.lending = lending or KvLending(settings.tuning.beat_busy_s)
        self.adapters = NodeAdapters(
            self._has_adapter,
            self._adapters_changed,
            self._adapter_removed,
            able=settings.has_ranks,
            max_bytes=settings.adapter_bytes,
        )
        self.awake = AwakeClock(telemetry.node.loop_lag.observe, _log_pause)
        self.background = telemetry.background
        self._telemetry, self._templates = telemetry, templates
        self._beside_a_server = not settings.has_ranks
        self._beats = count(1)
        self._nudge = asyncio.Event()
        new_version = partial(
            ModelVersion,
            settings,
            telemetry,
            tracing,
            templates,
            new_engines=new_engines,
            lending=self.lending,
            traffic=traffic or PageTraffic(settings, telemetry.pages),
            constraints=self.constraints,
            adapters=self.adapters,
            on_adapter=self._adapter_moved,
            on_change=self.changed,
        )
        self.versions = ModelVersions(new_version, self.changed)
        self.links = RouterLinks(settings.tuning.links, self.versions, telemetry)
        self.idleness = Idleness(self.versions, telemetry)
        self.submissions = Submissions(
            settings,
            self.versions,
            self.idleness,
            telemetry,
            templates=templates,
            constraints=self.constraints,
            drains=self.drains,
            on_busy=self.changed,
        )

    @property
    def version(self) -> ModelVersion:
        """The version that serves."""
        return self.versions.serving

    @property
    def host(self) -> ModelHost:
        """The host of the version that serves."""
        return self.version.host

    @property
    def state(self) -> NodeState:
        if self.drains and self.host.state is NodeState.READY:
            return NodeState.DRAINING
        return self.host.state

    @property
    def model_name(self) -> str:
        """The name of the model; empty without one."""
        return "" if self.host.choice is None else self.host.choice.name

    @property
    def num_running(self) -> int:
        """Generations that run, and inputs whose vectors are being computed, on all versions."""
        return self.versions.num_running

    def changed(self) -> None:
        """Sends the next beat at once."""
        self._nudge.set()

    def _has_adapter(self, digest: bytes) -> bool:
        return self.version.adapters.has(digest)

    def _adapters_changed(self, report: AdapterReport) -> None:
        """Tells the routers which adapters there are, or which is new, and has pinned ones loaded."""
        self.links.report(report_to_wire(report))
        self.keep_pinned()

    def _adapter_removed(self, digest: bytes) -> None:
        """Drops an adapter from the ranks' memory that is no longer registered, when nothing runs with it."""
        for version in self.versions:
            version.adapters.drop(digest)

    def _adapter_moved(self, digest: bytes) -> None:
        """Tells the routers that an adapter has come into the ranks' memory, or has gone."""
        registry = self.adapters.registry
        if moved := tuple(map(registry.report, registry.with_content(digest))):
            self.links.report(report_to_wire(AdapterReport(moved)))

    def keep_pinned(self) -> None:
        """Loads the pinned adapters that are not in memory."""
        if self.host.serving is not None and any(each.pinned for each in self.adapters.registry):
            self.background.once("pinned_adapters", self.version.load_pinned())

    async def count_tokens(self, model: str, prompt: Prompt) -> int:
        """Returns the number of tokens of the prompt.

        Raises NOT_FOUND for a model that is not loaded.
        """
        return len((await intake.tokenize(prompt, self.text_of(model), self._templates)).token_ids)

    def text_of(self, model: str) -> TextModel:
        """Returns the text side of the model. Raises NOT_FOUND for one that is not loaded."""
        text = self.host.text
        if text is None or model not in ("", text.name):
            raise errors.not_found("model", model)
        return text

    def beat(self) -> Beat:
        """Returns the current state of the model as a new beat."""
        announced, text = self.host.announced, self.host.text
        return Beat(
            sequence=next(self._beats),
            state=self.state,
            model=text.name if text is not None else "",
            context_length=announced.context_length if announced is not None else 0,
            load=self.versions.load,
            step=self.versions.step,
            reason=self._reason(),
            time=time.time(),
            profiling=self.versions.profiled,
            other_models=self.other_models,
            numerics=Numerics("" if announced is None else announced.numerics, self.version.pages.weights_digest),
            sampling_defaults=text.sampling_defaults if text is not None else NO_DEFAULTS,
            engine=OWN_ENGINE if announced is None else announced.engine,
            reserve=self.settings.reserve,
        )

    async def run(self, health: Health) -> None:
        """Sends beats until cancelled.

        Often while work runs, seldom while idle, at once after a change.
        """
        started = False
        while True:
            self._nudge.clear()
            beat = self.beat()
            self._show(beat)
            self.idleness.look()
            ready = beat.state is NodeState.READY
            await health.set_ready(ready)
            if self._beside_a_server:
                await health.set_engine(not self.host.condemned)
            if ready and not started:
                await health.set_started()
                started = True
            # Decided by the beat that was sent: after a beat with work a router expects the next
            # one soon, whatever has ended since.
            busy = self.num_running > 0 or beat.load.running + beat.load.waiting > 0
            try:
                async with asyncio.timeout(self.settings.tuning.beat_busy_s if busy else self.settings.tuning.beat_idle_s):
                    await self._nudge.wait()
            except TimeoutError:
                continue

    def _show(self, beat: Beat) -> None:
        self.links.beat(beat)
        self._telemetry.beats.inc()
        self._telemetry.set_state(beat.state)
        if (choice := self.host.choice) is not None:
            self._telemetry.model = choice.name
        self.version.show()
        for version in self.versions:
            version.count()
        if self.host.serving is not None and beat.sequence % _MEMORY_EVERY_BEATS == 0:
            self._telemetry.ranks.memory(self.host.serving.group.resident_bytes())
            self.version.seen_bytes = sum(self.host.serving.group.private_bytes())

    def _reason(self) -> str:
        return f"draining: {', '.join(sorted(self.drains))}" if self.state is NodeState.DRAINING else self.host.reason


def _log_pause(late_s: float) -> None:
    log.warning("event loop stalled", late_s=round(late_s, 3))
