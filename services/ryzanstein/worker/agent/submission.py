"""An attempt's way from a router's link to the engine: admitted, tokenized, woken for, handed over.

Also the way of an input of which a vector is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from itertools import count

import msgspec
import structlog

from ryzanstein import clock, errors
from ryzanstein.cluster import OWN_ENGINE, EngineTraits
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import EMBEDDINGS, Attempt
from ryzanstein.worker.agent import intake
from ryzanstein.worker.agent.adapters.residency import AdapterLease
from ryzanstein.worker.agent.idleness import Idleness
from ryzanstein.worker.agent.intake import Arrived, ReadPrompt
from ryzanstein.worker.agent.prompt_cut import fitted
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.agent.versions.model_versions import ModelVersions
from ryzanstein.worker.agent.versions.version import ModelVersion
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.grammars.judge import ConstraintJudge
from ryzanstein.worker.text.templates.rendering import ChatRenderer
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)


class Submissions:
    """Takes attempts and inputs to the engine of the version that serves.

    `drains` are the reasons, if any, for which everything new is refused. `on_busy` is called when
    an idle model gets work.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        versions: ModelVersions,
        idleness: Idleness,
        telemetry: WorkerTelemetry,
        *,
        templates: ChatRenderer,
        constraints: ConstraintJudge,
        drains: Set[str],
        on_busy: Callable[[], None],
    ) -> None:
        self._settings, self._versions, self._idleness = settings, versions, idleness
        self._telemetry, self._templates, self._constraints = telemetry, templates, constraints
        self._drains, self._on_busy = drains, on_busy
        self._groups = count(1)

    def may_take_long(self, attempt: Attempt) -> bool:
        """Returns whether the attempt may wait before it is submitted: for ranks, pages, an adapter, a grammar, a long text."""
        version, adapter = self._versions.serving, attempt.request.adapter
        if adapter is not None and not version.adapters.has(adapter.digest):
            return True
        grammar_or_text = intake.has_grammar(attempt) or intake.is_long(attempt)
        return version.host.asleep or grammar_or_text or version.pages.may_restore(attempt)

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

    async def vector(self, text: TextModel, group: SubmitGroup) -> bytes:
        """Returns the vector that the model with this text side makes of a group's prompt. Wakes ranks that sleep.

        Raises UNAVAILABLE when another node should be tried, else the error of the group.
        """
        version = self._versions.serving
        self._require_taking()
        await self._idleness.wake(version)
        self._require_taking()
        version.serving()
        if version is not self._versions.serving or text is not version.host.text:
            raise self._model_changed()
        engine = _engine_of(version)
        if EMBEDDINGS in engine.unsupported:
            raise errors.engine_lacks(text.name, EMBEDDINGS, engine.name)
        self._check(version, None, 1)
        if self._versions.num_running == 0:
            self._on_busy()
        return await version.vectors.vector(group)

    def new_group(self) -> int:
        """Returns the number of a new group of the engine."""
        return next(self._groups)

    def cancel(self, link: RouterLink, handle: int) -> None:
        """Cancels a generation for its router; unknown handles are ignored."""
        for version in self._versions:
            version.running.cancel(link, handle)

    def refuse(self, link: RouterLink, handle: int, error: RyzansteinError, **ids: str | int) -> None:
        """Fails an attempt of which nothing was started.

        A refusal is never a fault of the node in the sense of a breaker: the error code says
        whether another node may be tried. `ids` are added to the log line.
        """
        self._telemetry.refusals.labels(error.reason).inc()
        log.info("generation refused", reason=error.reason, message=error.message, **ids)
        link.fail(handle, error, node_fault=False)

    async def _submit(self, link: RouterLink, handle: int, attempt: Attempt) -> bool:
        """Hands the attempt to the engine; returns False when the version that serves has changed, or sleeps again."""
        version, adapter = self._versions.serving, attempt.request.adapter
        held = AdapterLease() if adapter is None else version.adapters.hold(adapter.digest)
        try:
            return await self._handed_over(version, link, handle, attempt)
        finally:
            held.release()

    async def _handed_over(self, version: ModelVersion, link: RouterLink, handle: int, attempt: Attempt) -> bool:
        """Does it while an adapter that is in memory stays there: what does not take long must not wait for it."""
        arrived = await intake.arrive(attempt, self._admit(version, attempt), self._templates, self._constraints)
        if (calling := arrived.read.calling) is not None and not calling.native and arrived.read.calls:
            self._telemetry.tool_fallbacks.inc()
        await self._idleness.wake(version)
        read = await self._fitted(version, arrived)
        await version.pages.restore(arrived.attempt, read.token_ids, arrived.text.name)
        lease = await version.lease(attempt.request.adapter)
        try:
            if version is not self._versions.serving or version.host.asleep:  # all this may take longer than its idle time
                return False
            self._start(version, link, handle, replace(arrived, read=read), lease)
        finally:
            lease.release()
        return True

    async def _fitted(self, version: ModelVersion, arrived: Arrived) -> ReadPrompt:
        """Returns the prompt, cut if the request allows that and it does not fit."""
        if arrived.attempt.request.sampling.keep_prompt_head is None:
            return arrived.read
        again = partial(intake.tokenize, model=arrived.text, templates=self._templates)
        return await fitted(arrived.attempt, arrived.read, version.serving().context_length, again)

    def _start(self, version: ModelVersion, link: RouterLink, handle: int, arrived: Arrived, lease: AdapterLease) -> None:
        """Hands the attempt to the engine, with the lease of its adapter.

        Without an await, so that what is checked first still holds at the end.
        """
        attempt, text, read, judged = arrived.attempt, arrived.text, arrived.read, arrived.judged
        self._require_taking()
        serving = version.serving()
        if text is not version.host.text:
            raise self._model_changed()
        if (lacking := attempt.request.lacking(serving.engine.lacking)) is not None:  # it slept, and woke as another
            raise lacking
        self._check(version, attempt.request.deadline, attempt.request.sampling.n)  # again: others arrived meanwhile
        was_idle = self._versions.num_running == 0
        number = self.new_group()
        asked = intake.group_of(attempt, number, read.token_ids, text, serving.context_length, judged=judged)
        follows = version.pages.follow(number, attempt, text.name)
        parks = follows and version.pages.parks
        asked = msgspec.structs.replace(asked, reports_pages=follows, parks=parks, adapter=lease.slot)
        submit = version.running.open(
            link,
            handle,
            attempt,
            asked,
            text,
            texts=arrived.texts,
            reply=intake.reply_of(read, attempt),
            num_omitted=read.num_omitted,
            lease=lease.taken(),
        )
        if submit is not None:
            if judged is not None:
                version.tell_tokens(judged.table)
            serving.group.send(submit)
        if was_idle:
            self._on_busy()

    def _admit(self, version: ModelVersion, attempt: Attempt) -> TextModel:
        """Returns the text model if the attempt may be tokenized; raises the refusal otherwise."""
        self._require_taking()
        text = version.text(attempt)
        if text.embedding is not None:
            raise errors.failed_precondition("EMBEDDINGS_ONLY", f"model {text.name} makes embeddings; it generates no text")
        if (lacking := attempt.request.lacking(_engine_of(version).lacking)) is not None:
            raise lacking
        if attempt.request.adapter is not None:
            version.adapter(attempt.request.adapter)
        self._check(version, attempt.request.deadline, attempt.request.sampling.n)
        return text

    def _require_taking(self) -> None:
        if self._drains:
            raise errors.draining(self._settings.node_id)

    def _model_changed(self) -> RyzansteinError:
        return errors.unavailable("NODE_NOT_READY", f"node {self._settings.node_id}: the model changed")

    def _check(self, version: ModelVersion, deadline: float | None, num: int) -> None:
        """Checks the deadline, and bounds what is on its way to the engine: `num` sequences more.

        The engine itself decides whom a full queue refuses, and reports that at once.
        """
        if deadline is not None and deadline <= clock.unix_s():
            raise errors.deadline_exceeded()
        bound = 2 * self._settings.max_waiting + self._settings.max_sequences
        if version.num_sequences + num > bound:
            raise errors.queue_full(version.num_sequences, bound)


def _engine_of(version: ModelVersion) -> EngineTraits:
    """Returns what the version's engine is, or was before it fell asleep."""
    announced = version.host.announced
    return OWN_ENGINE if announced is None else announced.engine
