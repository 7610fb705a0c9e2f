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

import msgspec
import structlog

from ryzanstein import clock, errors
from ryzanstein.awake import AwakeClock
from ryzanstein.cluster import Beat, Load, NodeState, Numerics
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.attempt import Attempt
from ryzanstein.generation.prompts import Prompt
from ryzanstein.tracing import Tracing
from ryzanstein.worker.agent import intake
from ryzanstein.worker.agent.lending import KvLending
from ryzanstein.worker.agent.model_host import ModelHost
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.agent.prompt_cut import CutPrompt, fitted
from ryzanstein.worker.agent.routers import LinkBounds, RouterLink
from ryzanstein.worker.agent.version import ModelVersion
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.ranks.forking import ForkServer
from ryzanstein.worker.ranks.source import NewRankServer
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.grammars.judge import ConstraintJudge, NoJudge
from ryzanstein.worker.text.templates.rendering import ChatRenderer
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

MAX_LINKS = 256
_MEMORY_EVERY_BEATS = 4  # read from files, so not with every beat


class Health(Protocol):
    """Where readiness is reported: the RpcServer."""

    async def set_ready(self, ready: bool) -> None: ...

    async def set_started(self) -> None: ...


class Room(Protocol):
    """Where a model that sleeps gets memory when it wakes, and gives it back; see `memory`."""

    async def take(self) -> None: ...

    def give_back(self) -> None: ...

    def close(self) -> None: ...


class NodeAgent:
    """The core of an agent, one per model of a node.

    It serves one version of its model at a time; what still runs on an earlier one ends there.
    `ranks_before` is how many ranks the agents before it have. `drains` holds the reasons for which
    new generations are refused; empty means none. `other_models` are the names of the models of the
    node's other agents, for its beats. After `idle_unload_s` without work the model sleeps; 0: never.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        telemetry: WorkerTelemetry,
        tracing: Tracing,
        templates: ChatRenderer,
        *,
        ranks_before: int = 0,
        new_rank_server: NewRankServer = ForkServer,
        lending: KvLending | None = None,
        traffic: PageTraffic | None = None,
        constraints: ConstraintJudge | None = None,
    ) -> None:
        self.settings = settings
        self.incarnation = uuid.uuid4().hex
        self.drains: set[str] = set()
        self.other_models: tuple[str, ...] = ()
        self.idle_unload_s = 0.0
        self.room: Room | None = None
        self._telemetry, self._tracing, self._templates = telemetry, tracing, templates
        self.constraints: ConstraintJudge = constraints or NoJudge()
        self._ranks_before, self._new_rank_server = ranks_before, new_rank_server
        self.lending = lending or KvLending(settings.beat_busy_s)
        self._traffic = traffic or PageTraffic(settings, telemetry.pages)
        self.version = self.new_version()
        self._retiring: list[ModelVersion] = []
        self._waking: dict[ModelVersion, asyncio.Task[None]] = {}
        self.awake = AwakeClock(telemetry.loop_lag.observe, _log_pause)
        self.background = telemetry.background
        self._links: list[RouterLink] = []
        self._groups = count(1)
        self._beats = count(1)
        self._nudge = asyncio.Event()
        self._busy_s = time.monotonic()

    @property
    def rested_s(self) -> float:
        """Seconds without work so far."""
        return 0.0 if self.num_running else time.monotonic() - self._busy_s

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
    def num_running(self) -> int:
        """Generations that run, and inputs whose vectors are being computed, on all versions."""
        return sum(version.num_running for version in self._versions())

    def changed(self) -> None:
        """Sends the next beat at once."""
        self._nudge.set()

    def new_version(self) -> ModelVersion:
        """Returns a version without a model, to be loaded beside the one that serves."""
        return ModelVersion(
            self.settings,
            self._telemetry,
            self._tracing,
            self._templates,
            ranks_before=self._ranks_before,
            new_rank_server=self._new_rank_server,
            lending=self.lending,
            traffic=self._traffic,
            constraints=self.constraints,
            on_change=self.changed,
        )

    async def switch(self, version: ModelVersion, grace_s: float) -> None:
        """Serves new generations by this version; returns when the earlier one is unloaded.

        What runs there may end within the grace; the rest fails over.
        """
        earlier, self.version = self.version, version
        self._retiring.append(earlier)
        self.changed()
        try:
            async with asyncio.timeout(grace_s):
                await earlier.idle()
        except TimeoutError:
            log.warning("drain grace period expired", running=earlier.num_running)
        finally:
            await earlier.host.unload()
            self._retiring.remove(earlier)
            self.changed()

    async def idle(self) -> None:
        """Returns when no generation runs."""
        for version in self._versions():
            await version.idle()

    async def unload(self) -> None:
        """Unloads all versions; returns when no rank is left."""
        for version in self._versions():
            await version.host.unload()

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
        for version in self._versions():
            version.running.close_link(link)
        self._links.remove(link)
        if link.overflowed:
            self._telemetry.link_overflows.inc()
        self._telemetry.links.set(len(self._links))
        log.info("router disconnected", router_id=link.router_id, overflowed=link.overflowed)

    def end_links(self) -> None:
        """Ends all links because the agent stops; the routers fail over what still runs.

        The ends of the last generations are sent before that.
        """
        for link in self._links:
            link.end()

    async def submit(self, link: RouterLink, handle: int, attempt: Attempt) -> None:
        """Accepts the attempt, or fails it on its link.

        Cancelled before the attempt is handed to the engine: nothing was started.
        """
        try:
            while not await self._submit(link, handle, attempt):
                log.info("model replaced or asleep while an attempt arrived", generation_id=attempt.generation_id)
        except RyzansteinError as error:
            ids = {"request_id": attempt.request.request_id, "generation_id": attempt.generation_id}
            self.refuse(link, handle, error, attempt=attempt.attempt, **ids)

    def may_take_long(self, attempt: Attempt) -> bool:
        """Returns whether the attempt may wait before it is submitted: for ranks that sleep, for pages, or for a grammar."""
        return self.host.asleep or intake.has_grammar(attempt) or self.version.pages.may_restore(attempt)

    async def hand_over(self) -> None:
        """Sends the pages of recent conversations to the nodes that would go on with them."""
        for version in self._versions():
            await version.pages.hand_over()

    def cancel(self, link: RouterLink, handle: int) -> None:
        """Cancels a generation for its router; unknown handles are ignored."""
        for version in self._versions():
            version.running.cancel(link, handle)

    def refuse(self, link: RouterLink, handle: int, error: RyzansteinError, **ids: str | int) -> None:
        """Fails an attempt of which nothing was started.

        A refusal is never a fault of the node in the sense of a breaker: the error code says
        whether another node may be tried. `ids` are added to the log line.
        """
        self._telemetry.refusals.labels(error.reason).inc()
        log.info("generation refused", reason=error.reason, message=error.message, **ids)
        link.fail(handle, error, node_fault=False)

    def new_group(self) -> int:
        """Returns the number of a new group of the engine."""
        return next(self._groups)

    async def vector(self, text: TextModel, group: SubmitGroup) -> bytes:
        """Returns the vector that the model with this text side makes of a group's prompt. Wakes ranks that sleep.

        Raises UNAVAILABLE when another node should be tried, else the error of the group.
        """
        version = self.version
        self._require_taking()
        await self._wake(version)
        self._require_taking()
        version.serving()
        if version is not self.version or text is not version.host.text:
            raise errors.unavailable("NODE_NOT_READY", f"node {self.settings.node_id}: the model changed")
        self._check(version, None, 1)
        if self.num_running == 0:
            self.changed()
        return await version.vectors.vector(group)

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
        shown, text = self.host.shown, self.host.text
        return Beat(
            sequence=next(self._beats),
            state=self.state,
            model=text.name if text is not None else "",
            context_length=shown.context_length if shown is not None else 0,
            load=self._load(),
            step=sum(version.step for version in self._versions()),
            reason=self._reason(),
            time=time.time(),
            profiling=any(version.profiled for version in self._versions()),
            other_models=self.other_models,
            numerics=Numerics("" if shown is None else shown.numerics, self.version.pages.weights_digest),
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
            self._rest()
            ready = beat.state is NodeState.READY
            await health.set_ready(ready)
            if ready and not started:
                await health.set_started()
                started = True
            # Decided by the beat that was sent: after a beat with work a router expects the next
            # one soon, whatever has ended since.
            busy = self.num_running > 0 or beat.load.running + beat.load.waiting > 0
            try:
                async with asyncio.timeout(self.settings.beat_busy_s if busy else self.settings.beat_idle_s):
                    await self._nudge.wait()
            except TimeoutError:
                continue

    async def sleep(self) -> None:
        """Unloads the ranks of a model that is idle; the next attempt loads them again."""
        if self.num_running == 0:
            await self.host.sleep()
            if self.room is not None and self.host.asleep and not self.host.waking:
                self.room.give_back()

    def _versions(self) -> tuple[ModelVersion, ...]:
        return (self.version, *self._retiring)

    def _rest(self) -> None:
        """Puts the model to sleep when nothing ran for `idle_unload_s`."""
        if self.num_running or self.host.serving is None:
            self._busy_s = time.monotonic()
        elif 0 < self.idle_unload_s <= self.rested_s:
            self.background.once("sleep", self.sleep())

    def _show(self, beat: Beat) -> None:
        for link in self._links:
            link.beat(beat)
        self._telemetry.beats.inc()
        self._telemetry.set_state(beat.state)
        self.version.show()
        for version in self._versions():
            version.count()
        if self.host.serving is not None and beat.sequence % _MEMORY_EVERY_BEATS == 0:
            self._telemetry.memory(self.host.serving.group.resident_bytes())
            self.version.seen_bytes = sum(self.host.serving.group.private_bytes())

    def _reason(self) -> str:
        return f"draining: {', '.join(sorted(self.drains))}" if self.state is NodeState.DRAINING else self.host.reason

    def _load(self) -> Load:
        """Returns the load of this version's ranks, with what still runs on earlier ones."""
        load = self.version.load
        if not self._retiring:
            return load
        others = [version.load for version in self._retiring]
        running = load.running + sum(other.running for other in others)
        waiting = load.waiting + sum(other.waiting for other in others)
        return Load(running, waiting, load.capacity, load.kv_blocks_used, load.kv_blocks_total)

    async def _submit(self, link: RouterLink, handle: int, attempt: Attempt) -> bool:
        """Hands the attempt to the engine; returns False when the version that serves has changed, or sleeps again."""
        version = self.version
        text = self._admit(version, attempt)
        sampling = attempt.request.sampling
        cuts = sampling.keep_prompt_head is not None
        keep = None if cuts else sampling.truncate_prompt_tokens
        read = await intake.tokenize(attempt.request.prompt, text, self._templates, keep, any_length=cuts)
        attempt = intake.constrained(attempt, read, text)
        if read.reply is not None and read.reply.calls and not text.calling.native:
            self._telemetry.tool_fallbacks.inc()
        texts = await intake.texts_of(attempt, text)
        judged = await intake.judged(attempt, text, self.constraints)
        await self._wake(version)
        cut = CutPrompt(read)
        if cuts:
            again = partial(intake.tokenize, model=text, templates=self._templates)
            cut = await fitted(attempt, read, version.serving().context_length, again)
            read = cut.read
        await version.pages.restore(attempt, read.token_ids, text.name)
        if version is not self.version or version.host.asleep:  # pages may take longer than the rest of its idle time
            return False
        self._require_taking()
        serving = version.serving()
        if text is not version.host.text:
            raise errors.unavailable("NODE_NOT_READY", f"node {self.settings.node_id}: the model changed")
        self._check(
            version, attempt.request.deadline, attempt.request.sampling.n
        )  # again: others arrived meanwhile; from here on there is no await
        was_idle = self.num_running == 0
        number = next(self._groups)
        asked = intake.group_of(attempt, number, read.token_ids, text, serving.context_length, judged=judged)
        follows = version.pages.follow(number, attempt, text.name)
        asked = msgspec.structs.replace(asked, reports_pages=follows, parks=follows and version.pages.parks)
        submit = version.running.open(
            link, handle, attempt, asked, text, texts=texts, reply=read.reply, num_omitted=cut.num_omitted
        )
        if submit is not None:
            if judged is not None:
                version.tell_tokens(judged.table)
            serving.group.send(submit)
        if was_idle:
            self.changed()
        return True

    async def _wake(self, version: ModelVersion) -> None:
        """Returns when the version's ranks serve or have failed to start, at once if they do not sleep.

        Attempts at the same time wait for the same start. It goes on when they are cancelled: half
        of it would leave memory taken.
        """
        if not version.host.asleep:
            return
        if version not in self._waking:
            self._telemetry.wakes.inc()
            self._waking[version] = self.background.once("wake", self._start_again(version))
            self._waking[version].add_done_callback(lambda _: self._waking.pop(version))
        await asyncio.shield(self._waking[version])

    async def _start_again(self, version: ModelVersion) -> None:
        if self.room is not None:
            await self.room.take()
        await version.host.wake()

    def _admit(self, version: ModelVersion, attempt: Attempt) -> TextModel:
        """Returns the text model if the attempt may be tokenized; raises the refusal otherwise."""
        self._require_taking()
        text = version.text(attempt)
        if text.embedding is not None:
            raise errors.failed_precondition("EMBEDDINGS_ONLY", f"model {text.name} makes embeddings; it generates no text")
        self._check(version, attempt.request.deadline, attempt.request.sampling.n)
        return text

    def _require_taking(self) -> None:
        if self.drains:
            raise errors.draining(self.settings.node_id)

    def _check(self, version: ModelVersion, deadline: float | None, num: int) -> None:
        """Checks the deadline, and bounds what is on its way to the engine: `num` sequences more.

        The engine itself decides whom a full queue refuses, and reports that at once.
        """
        if deadline is not None and deadline <= clock.unix_s():
            raise errors.deadline_exceeded()
        bound = 2 * self.settings.max_waiting + self.settings.max_sequences
        if version.num_sequences + num > bound:
            raise errors.queue_full(version.num_sequences, bound)


def _log_pause(late_s: float) -> None:
    log.warning("stood still, no router is disconnected for it", late_s=round(late_s, 3))
