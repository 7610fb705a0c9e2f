"""The engine of rank 0: schedule, execute, update.

It takes commands between steps and reports what each step produced. It is between the agent's
messages and the executor that runs a plan on all ranks; it knows neither torch nor processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.groups import Groups
from ryzanstein.worker.engine.memory.travel import take_sealed
from ryzanstein.worker.engine.messages import ClassStats, EngineStats, StepEvents, SubmitGroup
from ryzanstein.worker.engine.outcome import Probe, StepOutcome
from ryzanstein.worker.engine.plan import (
    Executor,
    OutOfMemory,
    PageMove,
    SampledToken,
    SequencesFailed,
    TokenConstraint,
)
from ryzanstein.worker.engine.scheduling.batch import Batch, Members
from ryzanstein.worker.engine.scheduling.pace import PromptCost, StepLimit, StepPace
from ryzanstein.worker.engine.scheduling.scheduler import Scheduler
from ryzanstein.worker.engine.sequence import DECODE_WEIGHT, Sequence


class Engine:
    """An engine that runs sequence groups to their end. Not thread-safe: one loop calls everything.

    `submit`, `cancel` and `finish` take effect before the next step. A failure of one group is an
    event of the next step, never an exception. An exception from `step` means that the ranks are
    lost.
    """

    def __init__(
        self,
        settings: EngineSettings,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Creates an engine. `clock` returns monotonic seconds, for deadlines; `timer` measures."""
        self._executor = executor
        self._clock = clock
        self._timer = timer
        self._pace, self._cost = StepPace(), PromptCost()
        self._scheduler = Scheduler(settings, self._cost, clock)
        self._pages = self._scheduler.pages.traveling()
        self._extents = settings.extents
        self._outcome = StepOutcome()
        self._groups = Groups(settings, self._scheduler, self._outcome, self._pace)
        self._step_limit = StepLimit(settings.token_budget)
        self._probe = Probe(executor)
        self._num_decoded: Counter[int] = Counter()
        self._step = 0
        self._starves = False
        self._prefill_tokens = 0
        self._decode_tokens = 0

    @property
    def has_work(self) -> bool:
        """Returns whether `step` has something to run or to report."""
        return len(self._groups) > 0 or not self._outcome.empty or self._scheduler.gives_back

    @property
    def starves(self) -> bool:
        """Returns whether sequences wait only for blocks, or for their constraints: the last step could run none."""
        return self._starves and self._outcome.empty and not self._scheduler.gives_back

    def submit(self, message: SubmitGroup, constraints: SequenceOf[TokenConstraint] = ()) -> None:
        """Queues a group. `constraints`: one for each choice, or none.

        Refusals (queue full, never fits, malformed) are GroupFailed events of the next step.
        """
        self._groups.submit(message, self._clock(), constraints)

    def refuse(self, message: SubmitGroup, error: RyzansteinError) -> None:
        """Reports a group as failed that cannot be queued."""
        self._groups.refuse(message, error)

    def cancel(self, group: int) -> None:
        """Frees everything that a group holds, without an event. Unknown groups are ignored."""
        self._groups.cancel(group)

    def finish(self, group: int, choice: int) -> None:
        """Ends one choice as STOP, with an event.

        Unknown choices are ignored: the choice may have ended meanwhile.
        """
        self._groups.finish(group, choice)

    def limit_blocks(self, num_blocks: int) -> None:
        """Limits the blocks to use, to at least one and at most all. See `SetBlockLimit`."""
        self._scheduler.limit_blocks(num_blocks)

    def returned(self, group: int, choice: int) -> None:
        """Runs a paused choice on. See `ReturnChoice`."""
        self._scheduler.parking.returned(group, choice)

    def find_pages(self, names: SequenceOf[bytes]) -> list[int]:
        """Returns the places of what is not cached. See `FindPages`."""
        return self._pages.missing(names)

    def export_pages(self, number: int, names: SequenceOf[bytes]) -> list[int]:
        """Copies cached pages into the slab; returns their places. See `ExportPages`."""
        found = self._pages.find(names)
        self._executor.move_pages(PageMove(number, True, found.blocks, found.hot))
        return found.places

    def import_pages(self, number: int, names: SequenceOf[bytes], parent: bytes) -> list[int]:
        """Takes pages from the slab; returns the places of those taken. See `ImportPages`."""
        admitted = self._pages.admit(names, parent)
        self._executor.move_pages(PageMove(number, False, admitted.blocks, admitted.hot))
        return admitted.places

    def step(self) -> StepEvents:
        """Runs one step and returns its events.

        If there is no sequence that fits, no step runs, and only pending events are returned.
        """
        began = self._timer()
        self._groups.expire(self._clock())
        if self._scheduler.gives_back:
            self._executor.rearrange(self._scheduler.give_back())
        batch = self._scheduler.schedule(self._step_limit.limit)
        self._starves = not batch and len(self._groups) > 0
        for sequence in self._scheduler.take_paused():
            self._outcome.add_paused(sequence)
        if self._scheduler.parking.parked:
            self._outcome.add_returning(self._scheduler.parking.take_returning())
        if batch:
            num_before = self._prefill_tokens
            self._run(batch)
            self._measure(batch, self._prefill_tokens - num_before, self._timer() - began)
        return self._outcome.take(self._step, self.stats(), self._timer() - began)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=self._groups.num_waiting,
            blocks_held=scheduler.pool.num_held,
            blocks_cached=scheduler.pool.num_idle,
            preemptions=scheduler.num_paused.total(),
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            memory_retries=self._step_limit.num_shortages,
            expected_wait_s=self._groups.shedding.newcomer_s,
            paused=dict(scheduler.num_paused),
            resumed=scheduler.num_resumed,
            shed=dict(self._groups.num_shed),
            classes={
                priority: ClassStats(num_waiting, scheduler.num_prefilled[priority], self._num_decoded[priority])
                for priority, num_waiting in scheduler.waiting.num_waiting.items()
            },
            block_limit=scheduler.pool.ceiling,
            blocks_wanted=scheduler.num_wanted,
            takebacks=scheduler.num_takebacks,
            blocks_evicted=scheduler.pool.num_evicted,
            hot=scheduler.pages.hot_stats,
            states=scheduler.pages.state_stats,
            without_state=scheduler.num_without_state,
        )

    def _measure(self, batch: Batch, num_prefill: int, duration_s: float) -> None:
        self._pace.step(num_prefill, duration_s)
        if num_prefill == batch.num_tokens - batch.num_decodes:  # not those of which only a part ran
            self._cost.step(num_prefill, batch.num_pairs, duration_s)

    def _run(self, batch: Batch) -> None:
        """Executes a batch: at once, or in parts if there is not enough memory for all of it.

        A part that turns out to be too large is not finished: after its first half, the next step
        plans the rest. Otherwise a long prompt would be computed a few tokens at a time within one
        step, which no router hears of.
        """
        shortage = ""
        if self._step_limit.allows(batch.num_tokens) and not (shortage := self._execute(batch)):
            self._step_limit.went(batch.num_tokens)
        elif batch.num_tokens > 1:
            for part in batch.halves()[: 1 if shortage else 2]:
                self._run_part(part)
        else:
            ((sequence, _),) = batch.members
            self._groups.fail(sequence.group.id, errors.out_of_memory(f"not enough memory for a single token: {shortage}"))

    def _run_part(self, members: Members) -> None:
        """Runs what the parts before it left to run.

        A group that failed or ended in an earlier part takes its other choices with it.
        """
        batch = Batch(self._scheduler.pages.num_groups)
        for sequence, num in members:
            if sequence in self._scheduler.running:
                batch.feed(sequence, num)
        if batch:
            self._run(batch)

    def _execute(self, batch: Batch) -> str:
        """Executes a batch; returns what ran out of memory, or an empty string.

        If memory ran out, nothing has changed. If rows failed, their groups fail and the step does
        not count: the others run again with the same random draws.
        """
        self._step += 1
        plan = batch.plan(self._step, self._scheduler.pages.runs(batch.members))
        try:
            self._update(batch, self._executor.execute(plan, batch.rows))
        except OutOfMemory as error:
            self._step_limit.short(batch.num_tokens)
            return str(error)
        except SequencesFailed as failure:
            self._fail(batch, failure)
        return ""

    def _fail(self, batch: Batch, failure: SequencesFailed) -> None:
        """Fails the groups whose logits are not finite.

        Ranks that fail at another prompt as well are lost, see `Probe`.
        """
        self._step += 1
        tables = batch.of_row(next(iter(failure.rows))).tables
        self._probe.require_sound(self._step, [table.blocks[-1] for table in tables], self._scheduler.pages.num_groups)
        for row, message in failure.rows.items():
            self._groups.fail(batch.of_row(row).group.id, errors.logits_not_finite(message))

    def _update(self, batch: Batch, sampled: SequenceOf[SampledToken]) -> None:
        self._decode_tokens += batch.num_decodes
        self._prefill_tokens += batch.num_tokens - batch.num_decodes
        self._scheduler.advance(batch)
        self._report_sealed(batch)
        for sequence in batch.unfinished:
            self._outcome.add_prefilled(sequence)
        num_sampled = len(batch.sampled)
        self._score(batch, sampled[num_sampled:])
        failures: dict[int, str] = {}
        for sequence, token in zip(batch.sampled, sampled[:num_sampled], strict=True):
            sequence.group.account.counter += DECODE_WEIGHT * self._cost_of(sequence)
            self._num_decoded[sequence.group.priority] += 1
            reason = sequence.append(token.token_id)
            if sequence.failure:
                failures[sequence.group.id] = sequence.failure
                continue
            self._outcome.add_token(sequence, token)
            if sequence.group.followers:
                self._groups.release_followers(sequence)
            if reason is not None:
                self._groups.end(sequence, reason)
        for group, failure in failures.items():
            self._groups.fail(group, errors.constraint_failed(failure))
        self._pool(batch, sampled[len(sampled) - sum(count for _, count in batch.pooled) :])

    def _cost_of(self, sequence: Sequence) -> int:
        """Returns how many tokens count for one: those of an expensive constraint as many as take its time in steps."""
        if sequence.row.constraint is None or not self._pace.step_s:
            return 1
        return 1 + int(sequence.row.constraint.cost_s / self._pace.step_s)

    def _report_sealed(self, batch: Batch) -> None:
        for sequence, _ in batch.members:
            if sequence.group.message.reports_pages and (sealed := take_sealed(sequence, self._extents)):
                self._outcome.add_sealed(sequence.group.id, sealed)

    def _score(self, batch: Batch, scores: SequenceOf[SampledToken]) -> None:
        """Reports the scores of prompt tokens, each once also when a prompt is computed again."""
        begin = 0
        for sequence, first, count in batch.scored:
            sequence.group.num_scored = first + count
            self._outcome.add_scores(sequence, first, scores[begin : begin + count])
            begin += count

    def _pool(self, batch: Batch, rows: SequenceOf[SampledToken]) -> None:
        """Adds hidden states to the vectors of their prompts, and ends those that are whole."""
        begin = 0
        for sequence, count in batch.pooled:
            group = sequence.group
            if group.pool is None:
                raise ValueError(f"group {group.id} wants no vector")
            group.pool.add([row.hidden for row in rows[begin : begin + count]])
            begin += count
            if group.pool.first == group.num_prompt:
                self._outcome.add_vector(group.id, group.pool.vector())
                self._groups.end(sequence, FinishReason.STOP)
