"""The node's core: links to routers on one side, ranks on the other, and the state of the node.

A token's path: StepEvents from rank 0, `RunningGenerations` (text), the router's link, all in one
call in the event loop. The beat is sent by the same loop, so a frozen agent sends none. This module
knows neither gRPC servicers nor the orchestrator.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from itertools import count
from typing import Protocol

import structlog

from ryzanstein import clock, errors
from ryzanstein.awake import AwakeClock
from ryzanstein.cluster import Beat, Load, NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation import Attempt, Prompt
from ryzanstein.tracing import Tracing
from ryzanstein.worker.agent import intake
from ryzanstein.worker.agent.generations import RunningGenerations
from ryzanstein.worker.agent.model_host import ModelChoice, ModelHost, Serving
from ryzanstein.worker.agent.profiling import Profiling
from ryzanstein.worker.agent.routers import LinkBounds, RouterLink
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice, StepEvents
from ryzanstein.worker.engines.group import PROFILE, GroupEvents
from ryzanstein.worker.engines.recovery import Rung
from ryzanstein.worker.ranks.forking import ForkServer
from ryzanstein.worker.ranks.native import NativeEngines
from ryzanstein.worker.ranks.source import NewRankServer
from ryzanstein.worker.telemetry import NO_STATS, WorkerTelemetry
from ryzanstein.worker.text.templates.rendering import ChatRenderer
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

MAX_LINKS = 256
FAILED_ALONE = (errors.OUT_OF_MEMORY, errors.LOGITS_NOT_FINITE)
_MEMORY_EVERY_BEATS = 4  # read from files, so not with every beat


class Health(Protocol):
    """Where readiness is reported: the RpcServer."""

    async def set_ready(self, ready: bool) -> None: ...

    async def set_started(self) -> None: ...


class NodeAgent:
    """The core of an agent, one per model of a node.

    `other_models` are the names of the models of the node's other agents, for its beats;
    `ranks_before` is how many ranks the agents before it have. `drains` holds the reasons for which
    new generations are refused; empty means none.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        telemetry: WorkerTelemetry,
        tracing: Tracing,
        templates: ChatRenderer,
        *,
        other_models: Sequence[str] = (),
        ranks_before: int = 0,
        new_rank_server: NewRankServer = ForkServer,
    ) -> None:
        self.settings = settings
        self._other_models = tuple(other_models)
        self._ranks_before = ranks_before
        self.incarnation = uuid.uuid4().hex
        self.drains: set[str] = set()
        self.stats = NO_STATS
        self.profiling = Profiling()
        self.running = RunningGenerations(self._send, telemetry, tracing)
        self._events = GroupEvents(self._on_step, self.profiling.on_trace, lambda: len(self.running) > 0)
        self._new_rank_server = new_rank_server
        self.host = ModelHost(
            settings,
            self._engines,
            telemetry,
            on_change=self.changed,
            on_gone=self._on_gone,
            templates=templates,
        )
        self._templates = templates
        self.awake = AwakeClock(telemetry.loop_lag.observe, _log_pause)
        self._telemetry = telemetry
        self.background = telemetry.background
        self._links: list[RouterLink] = []
        self._groups = count(1)
        self._beats = count(1)
        self._nudge = asyncio.Event()

    @property
    def state(self) -> NodeState:
        if self.drains and self.host.state is NodeState.READY:
            return NodeState.DRAINING
        return self.host.state

    def changed(self) -> None:
        """Sends the next beat at once."""
        self._nudge.set()

    def connect(self, router_id: str) -> RouterLink:
        """Returns a link for the router. Release it with `disconnect`.

        Raises RESOURCE_EXHAUSTED when too many routers are connected.
        """
        if len(self._links) >= MAX_LINKS:
            raise RyzansteinError(f"too many routers, the limit is {MAX_LINKS}", Code.RESOURCE_EXHAUSTED, "TOO_MANY_LINKS")
        link = RouterLink(router_id, LinkBounds(self.settings.link_rows, self.settings.link_bytes))
        self._links.append(link)
        self._telemetry.links.set(len(self._links))
        log.info("router connected", router_id=router_id)
        return link

    def disconnect(self, link: RouterLink) -> None:
        """Cancels what the router submitted and releases the link."""
        self.running.close_link(link)
        self._links.remove(link)
        if link.overflowed:
            self._telemetry.link_overflows.inc()
        self._telemetry.links.set(len(self._links))
        log.info("router disconnected", router_id=link.router_id, overflowed=link.overflowed)

    def end_links(self) -> None:
        """Ends all links because the node stops; the routers fail over what still runs.

        The ends of the last generations are sent before that.
        """
        for link in self._links:
            link.end()

    async def submit(self, link: RouterLink, handle: int, attempt: Attempt) -> None:
        """Accepts the attempt, or fails it on its link.

        Cancelled before the attempt is handed to the engine: nothing was started.
        """
        try:
            await self._submit(link, handle, attempt)
        except RyzansteinError as error:
            ids = {"request_id": attempt.request.request_id, "generation_id": attempt.generation_id}
            self.refuse(link, handle, error, attempt=attempt.attempt, **ids)

    def refuse(self, link: RouterLink, handle: int, error: RyzansteinError, **ids: str | int) -> None:
        """Fails an attempt of which nothing was started.

        A refusal is never a fault of the node in the sense of a breaker: the error code says
        whether another node may be tried. `ids` are added to the log line.
        """
        self._telemetry.refusals.labels(error.reason).inc()
        log.info("generation refused", reason=error.reason, message=error.message, **ids)
        link.fail(handle, error, node_fault=False)

    async def count_tokens(self, model: str, prompt: Prompt) -> int:
        """Returns the number of tokens of the prompt.

        Raises NOT_FOUND for a model that is not loaded.
        """
        text = self.host.text
        if text is None or model not in ("", text.name):
            raise errors.not_found("model", model)
        return len(await intake.tokenize(prompt, text, self._templates))

    def beat(self) -> Beat:
        """Returns the current state of the node as a new beat."""
        serving, text = self.host.serving, self.host.text
        ranks = serving.group.progress() if serving is not None else []
        return Beat(
            sequence=next(self._beats),
            state=self.state,
            model=text.name if text is not None else "",
            context_length=serving.context_length if serving is not None else 0,
            load=self._load(serving),
            step=ranks[0].step if ranks else 0,
            reason=self._reason(),
            time=time.time(),
            profiling=any(rank.phase == PROFILE for rank in ranks),
            other_models=self._other_models,
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
            ready = beat.state is NodeState.READY
            await health.set_ready(ready)
            if ready and not started:
                await health.set_started()
                started = True
            # Decided by the beat that was sent: after a beat with work a router expects the next
            # one soon, whatever has ended since.
            busy = len(self.running) > 0 or beat.load.running + beat.load.waiting > 0
            try:
                async with asyncio.timeout(self.settings.beat_busy_s if busy else self.settings.beat_idle_s):
                    await self._nudge.wait()
            except TimeoutError:
                continue

    def _show(self, beat: Beat) -> None:
        for link in self._links:
            link.beat(beat)
        self._telemetry.beats.inc()
        self._telemetry.set_state(beat.state)
        self._telemetry.engine(self.stats)
        if self.host.serving is not None:
            group = self.host.serving.group
            self._telemetry.progress(group.progress(), group.slowness())
            if beat.sequence % _MEMORY_EVERY_BEATS == 0:
                self._telemetry.memory(group.resident_bytes())

    def _reason(self) -> str:
        return f"draining: {', '.join(sorted(self.drains))}" if self.state is NodeState.DRAINING else self.host.reason

    def _engines(self, choice: ModelChoice) -> NativeEngines:
        spec, bounds = self.settings.rank_spec(choice.path, self._ranks_before), self.settings.group_bounds()
        return NativeEngines(spec, bounds, self._events, new_server=self._new_rank_server)

    def _load(self, serving: Serving | None) -> Load:
        """Returns the load that the engine last reported, plus what was sent to it since."""
        running = self.stats.running
        waiting = max(self.stats.waiting, self.running.num_choices - running)
        if serving is None:
            return Load()
        return Load(running, waiting, serving.max_sequences, self.stats.blocks_held, serving.num_blocks)

    async def _submit(self, link: RouterLink, handle: int, attempt: Attempt) -> None:
        text = self._admit(attempt)
        prompt_ids = await intake.tokenize(attempt.request.prompt, text, self._templates)
        texts = await intake.texts_of(attempt, text)
        serving = self._serving(attempt)
        if text is not self.host.text:
            raise errors.unavailable("NODE_NOT_READY", f"node {self.settings.node_id}: the model changed")
        self._check_room(attempt)  # again: others arrived during tokenization; from here on there is no await
        was_idle = len(self.running) == 0
        asked = intake.group_of(attempt, next(self._groups), prompt_ids, text, serving.context_length)
        submit = self.running.open(link, handle, attempt, asked, text, texts=texts)
        if submit is not None:
            serving.group.send(submit)
        if was_idle:
            self.changed()

    def _admit(self, attempt: Attempt) -> TextModel:
        """Returns the text model if the attempt may be tokenized; raises the refusal otherwise."""
        self._serving(attempt)
        text = self.host.text
        assert text is not None
        deadline = attempt.request.deadline
        if deadline is not None and deadline <= clock.unix_s():
            raise errors.deadline_exceeded()
        self._check_room(attempt)
        return text

    def _check_room(self, attempt: Attempt) -> None:
        """Bounds only what is on its way to the engine.

        The engine itself decides whom a full queue refuses, and reports that at once.
        """
        bound = 2 * self.settings.max_waiting + self.settings.max_sequences
        if self.running.num_choices + attempt.request.sampling.n > bound:
            raise errors.queue_full(self.running.num_choices, bound)

    def _serving(self, attempt: Attempt) -> Serving:
        """Returns the serving ranks. Raises UNAVAILABLE when another node should be tried."""
        if self.drains:
            raise errors.draining(self.settings.node_id)
        serving, text = self.host.serving, self.host.text
        if serving is None or text is None:
            raise errors.unavailable("NODE_NOT_READY", f"node {self.settings.node_id}: {self.host.reason}")
        if attempt.request.model not in ("", text.name):
            message = f"node {self.settings.node_id} serves {text.name!r}, not {attempt.request.model[:128]!r}"
            raise errors.unavailable("MODEL_NOT_SERVED", message)
        return serving

    def _send(self, message: CancelGroup | FinishChoice) -> None:
        if self.host.serving is not None:
            self.host.serving.group.send(message)

    def _on_step(self, events: StepEvents) -> None:
        self._note_recoveries(events)
        self.stats = events.stats
        self.running.on_step(events)

    def _note_recoveries(self, events: StepEvents) -> None:
        """Counts the lower rungs of the recovery ladder, which the engine handles on its own."""
        retries = events.stats.memory_retries - self.stats.memory_retries
        if retries > 0:
            self._telemetry.recoveries.labels(Rung.RETRY_SMALLER.value).inc(retries)
            log.warning("step retried in smaller parts", retries=retries, rung=Rung.RETRY_SMALLER.value)
        failed = sum(failure.reason in FAILED_ALONE for failure in events.failed)
        if failed:
            self._telemetry.recoveries.labels(Rung.FAIL_REQUEST.value).inc(failed)

    def _on_gone(self, error: RyzansteinError, node_fault: bool) -> None:
        """Fails everything that ran on the lost ranks."""
        self.stats = NO_STATS
        self._telemetry.ranks_gone()
        self.running.fail_all(error, node_fault=node_fault)
        self.profiling.on_gone(error)


def _log_pause(late_s: float) -> None:
    log.warning("stood still, no router is disconnected for it", late_s=round(late_s, 3))
