"""The generations that run on this node, and the path of a step's tokens to their routers.

Tokens become text here, one by one, and stop strings end choices here. This module knows links and
text, not ranks: messages to the engine go through `send`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog
from opentelemetry.trace import Span, SpanKind

from ryzanstein.errors import LOGITS_NOT_FINITE, Code, RyzansteinError
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.request import Attempt
from ryzanstein.generation.tokens import FinishReason, PromptScores, PromptToken, Token, TokenLogprobs, TopLogprob
from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.worker.agent.adapters.residency import AdapterLease
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.agent.versions.attempt_times import AttemptTimes
from ryzanstein.worker.agent.versions.step_spans import StepSpans
from ryzanstein.worker.agent.versions.vectors import error_of
from ryzanstein.worker.engine.messages import CancelGroup, ChoiceEnd, FinishChoice, StepEvents, SubmitGroup
from ryzanstein.worker.supervision.group import RankProgress, RankStep
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.choice import ChoiceText
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class RunningChoice:
    """A choice that runs: its text so far, and where it is in its token log.

    `first_index` is the index of the first token of this attempt, `next_index` that of the next
    token. `stopped`: a stop string ended it; `ended`: the router has been notified of its end too.
    """

    text: ChoiceText
    first_index: int
    next_index: int
    stopped: bool = False
    ended: bool = False

    @property
    def num_new(self) -> int:
        """Returns the number of tokens of this attempt."""
        return self.next_index - self.first_index


@dataclass(slots=True)
class RunningGeneration:
    """An attempt on this node."""

    group: int
    handle: int
    link: RouterLink
    attempt: Attempt
    model: TextModel
    choices: list[RunningChoice]
    span: Span
    phase: Span
    prompt_ids: Sequence[int]
    times: AttemptTimes
    reply: ReplyStyle | None = None
    num_omitted: int = 0
    accepted: bool = False
    lease: AdapterLease = field(default_factory=AdapterLease)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def ids(self) -> dict[str, str | int]:
        """Returns the fields of each of its log lines."""
        return {
            "request_id": self.attempt.request.request_id,
            "generation_id": self.attempt.generation_id,
            "attempt": self.attempt.attempt,
        }


class RunningGenerations:
    """The groups by number, from submit to the end of the last choice.

    `idle` is set while there are no groups. `lead` returns what rank 0 has done so far, or None without ranks.
    """

    def __init__(
        self,
        send: Callable[[CancelGroup | FinishChoice], None],
        telemetry: WorkerTelemetry,
        tracing: Tracing,
        lead: Callable[[], RankProgress | None] = lambda: None,
        steps: Callable[[int], Sequence[RankStep]] = lambda _: (),
    ) -> None:
        self._send, self._lead = send, lead
        self._step, self._step_s = 0, 0.0
        self._telemetry = telemetry
        self._tracing, self._step_spans = tracing, StepSpans(tracing, steps)
        self._groups: dict[int, RunningGeneration] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[RunningGeneration]:
        """Yields the generations, those that came first first."""
        yield from self._groups.values()

    @property
    def num_choices(self) -> int:
        """Returns the number of sequences that the engine has or will get."""
        return sum(not choice.ended for generation in self._groups.values() for choice in generation.choices)

    def open(
        self,
        link: RouterLink,
        handle: int,
        attempt: Attempt,
        submit: SubmitGroup,
        model: TextModel,
        *,
        texts: Sequence[ChoiceText],
        reply: ReplyStyle | None = None,
        num_omitted: int = 0,
        lease: AdapterLease | None = None,
    ) -> SubmitGroup | None:
        """Adds a generation; returns what the engine must run of it, or None if nothing is left.

        `texts` are the choices' texts so far, `reply` is how the router reads them; `num_omitted`
        tokens of the prompt were left out; `lease` is released when the generation ends. The router is
        notified of the acceptance only when the engine has accepted the group, so that a refusal comes
        before anything that a client sees.

        A choice whose known tokens already contain a stop string has ended: only its end is sent
        again.
        """
        choices = [_resume(submit, number, text) for number, text in enumerate(texts)]
        about = {"prompt_tokens": len(submit.prompt_ids)}
        span = self._tracing.start("node.generation", attempt.request.traceparent, about, kind=SpanKind.SERVER)
        phase = self._tracing.start("node.prefill", traceparent(span))
        times = AttemptTimes(self._telemetry.attempts)
        generation = RunningGeneration(
            submit.group, handle, link, attempt, model, choices, span, phase, submit.prompt_ids, times, reply, num_omitted
        )
        generation.lease = lease or generation.lease
        self._groups[submit.group] = generation
        self._step_spans.begin(submit.group, phase)
        self.idle.clear()
        link.handles[handle] = submit.group
        if submit.sampling.constraint is None:
            link.handed_over(handle)
        for number, choice in enumerate(choices):
            if choice.stopped and not choice.ended:
                self._end_choice(generation, ChoiceEnd(submit.group, number, FinishReason.STOP, 0))
        if submit.group not in self._groups:
            return None
        return msgspec.structs.replace(submit, finished=[choice.ended for choice in choices])

    def on_step(self, events: StepEvents) -> None:
        """Sends one step's tokens, ends and failures to their links."""
        self._step, self._step_s = events.step, events.step_s
        self._step_spans.on_step(events)
        self._accept_all(events.accepted)
        self._report_prefilled(events.prefilled)
        for group, first, rows in events.scores:
            if (generation := self._groups.get(group)) is not None:
                self._accept(generation)
                generation.link.score(generation.handle, _scores(generation, first, rows))
        ends = {(end.group, end.choice): end for end in events.ended}
        links: dict[int, RouterLink] = {}
        for row, (group, choice, token_id) in enumerate(zip(events.groups, events.choices, events.token_ids, strict=True)):
            generation = self._groups.get(group)
            if generation is not None:
                links[id(generation.link)] = generation.link
                logprobs = events.logprobs.get(row)
                self._add_token(generation, choice, token_id, logprobs, last=(group, choice) in ends)
        for group, choice in events.paused:
            generation = self._groups.get(group)
            if generation is not None and not generation.choices[choice].stopped:
                links[id(generation.link)] = generation.link
                generation.link.preempt(generation.handle, choice)
        self._end_all(events)
        for link in links.values():
            link.end_step(events.step)
            if link.closed:
                self.close_link(link)

    def cancel(self, link: RouterLink, handle: int) -> None:
        """Cancels a generation for its router.

        Unknown handles are ignored: it may have ended meanwhile, or run on another version of the
        model.
        """
        generation = self._groups.get(link.handles.get(handle, 0))
        if generation is not None:
            self._send(CancelGroup(generation.group))
            self._close(generation, "cancelled")

    def close_link(self, link: RouterLink) -> None:
        """Cancels everything of a router that is gone."""
        for handle in list(link.handles):
            self.cancel(link, handle)

    def fail(self, generation: RunningGeneration, error: RyzansteinError, *, node_fault: bool) -> None:
        """Ends a generation with an error. The engine no longer has it."""
        generation.link.fail(generation.handle, error, node_fault=node_fault)
        log.warning("generation failed", reason=error.reason, message=error.message, **generation.ids)
        self._close(generation, error.reason.lower())

    def fail_all(self, error: RyzansteinError, *, node_fault: bool) -> None:
        """Fails every generation because the ranks are gone."""
        for generation in list(self._groups.values()):
            self.fail(generation, error, node_fault=node_fault)

    def _end_all(self, events: StepEvents) -> None:
        for end in events.ended:
            if (generation := self._groups.get(end.group)) is not None:
                self._end_choice(generation, end)
        for failed in events.failed:
            if (generation := self._groups.get(failed.group)) is not None:
                error = error_of(failed)
                # Logits that are not finite are not the node's fault here: the ranks were probed,
                # see engine.probe.
                node_fault = failed.code == Code.INTERNAL and failed.reason != LOGITS_NOT_FINITE
                self.fail(generation, error, node_fault=node_fault)

    def _accept_all(self, groups: Iterable[int]) -> None:
        for group in groups:
            if (generation := self._groups.get(group)) is not None:
                self._accept(generation)

    def _report_prefilled(self, groups: Iterable[tuple[int, int]]) -> None:
        for group, num_computed in groups:
            if (generation := self._groups.get(group)) is not None:
                self._accept(generation)
                self._computed(generation)
                generation.times.prefilled(num_computed)
                generation.link.progress(generation.handle, num_computed)

    def _accept(self, generation: RunningGeneration) -> None:
        if not generation.accepted:
            generation.accepted = True
            generation.times.moved()
            self._telemetry.attempts.prompt_tokens.observe(generation.num_prompt)
            generation.link.accept(generation.handle, generation.num_prompt, generation.reply, generation.num_omitted)
            if generation.attempt.request.sampling.prompt_logprobs is not None:
                first = generation.prompt_ids[0]
                token = PromptToken(first, generation.model.token_text(first), None)
                generation.link.score(generation.handle, PromptScores(0, [token]))
            log.info(
                "generation accepted",
                prompt_tokens=generation.num_prompt,
                router_id=generation.link.router_id,
                **generation.ids,
            )

    def _add_token(
        self,
        generation: RunningGeneration,
        number: int,
        token_id: int,
        logprobs: tuple[float, list[tuple[int, float]]] | None,
        *,
        last: bool,
    ) -> None:
        choice = generation.choices[number]
        if choice.stopped:
            self._telemetry.late_tokens.inc()
            return
        if not generation.times.first_token_s:
            self._accept(generation)
            self._computed(generation)
            self._first_token(generation)
        entry = None if logprobs is None else _logprobs(token_id, logprobs, choice.text, generation.model)
        text, choice.stopped = choice.text.push(token_id)
        if last and not choice.stopped:
            text += choice.text.flush()
        token = Token(token_id, text, entry)
        generation.link.add_row(generation.handle, number, choice.next_index, token)
        choice.next_index += 1
        generation.times.moved()
        if choice.stopped and not last:
            self._send(FinishChoice(generation.group, number))

    def _computed(self, generation: RunningGeneration) -> None:
        if not generation.times.computed_s:
            generation.times.computed(self._step, self._step_s, self._lead())

    def _first_token(self, generation: RunningGeneration) -> None:
        generation.times.first_token()
        generation.phase.end()
        generation.phase = self._tracing.start("node.decode", traceparent(generation.span))
        self._step_spans.begin(generation.group, generation.phase, decodes=True)

    def _end_choice(self, generation: RunningGeneration, end: ChoiceEnd) -> None:
        choice = generation.choices[end.choice]
        if choice.ended:
            return
        choice.ended = True
        self._accept(generation)
        reason = FinishReason.STOP if choice.stopped else FinishReason(end.reason)
        generation.link.finish(generation.handle, end.choice, reason, end.cached_tokens)
        self._observe(generation, choice, reason, end.cached_tokens)
        if all(other.ended for other in generation.choices):
            self._close(generation, "finished")

    def _observe(self, generation: RunningGeneration, choice: RunningChoice, reason: FinishReason, cached_tokens: int) -> None:
        self._telemetry.attempts.choices.labels(reason.name.lower()).inc()
        generation.span.set_attribute("cached_prompt_tokens", cached_tokens)
        if choice.num_new > 1:
            decode_s = time.monotonic() - generation.times.first_token_s
            self._telemetry.attempts.per_token.observe(decode_s / (choice.num_new - 1))

    def _close(self, generation: RunningGeneration, outcome: str) -> None:
        del self._groups[generation.group]
        del generation.link.handles[generation.handle]
        generation.link.prepared(generation.handle)
        generation.lease.release()
        if not self._groups:
            self.idle.set()
        self._telemetry.attempts.outcomes.labels(outcome).inc()
        self._step_spans.end(generation.group)
        generation.phase.end()
        generation.span.set_attribute("outcome", outcome)
        generation.span.end()
        tokens = sum(choice.num_new for choice in generation.choices)
        self._telemetry.attempts.generated_tokens.observe(tokens)
        spent = generation.times.ended(self._step, self._lead())
        log.info("generation ended", outcome=outcome, tokens=tokens, **spent, **generation.ids)


def _scores(generation: RunningGeneration, first: int, rows: Sequence[tuple[float, list[tuple[int, float]]]]) -> PromptScores:
    """Returns a part of the prompt with its log probabilities."""
    text_of, token_ids = generation.model.token_text, generation.prompt_ids[first : first + len(rows)]
    tokens = [
        PromptToken(token_id, text_of(token_id), own, tuple(TopLogprob(other, text_of(other), value) for other, value in top))
        for token_id, (own, top) in zip(token_ids, rows, strict=True)
    ]
    return PromptScores(first, tokens)


def _resume(submit: SubmitGroup, number: int, text: ChoiceText) -> RunningChoice:
    """Returns a choice that continues after the tokens of earlier attempts."""
    num_known = len(submit.generated[number])
    return RunningChoice(text, num_known, num_known, text.stopped, submit.finished[number])


def _logprobs(token_id: int, raw: tuple[float, list[tuple[int, float]]], text: ChoiceText, model: TextModel) -> TokenLogprobs:
    """Returns the logprobs of a choice's next token.

    Call it before the choice's text takes the token.
    """
    logprob, top = raw
    likeliest = (TopLogprob(other, model.token_text(other), value, text.next_bytes(other)) for other, value in top)
    return TokenLogprobs(logprob, tuple(likeliest), model.token_text(token_id), text.next_bytes(token_id))
