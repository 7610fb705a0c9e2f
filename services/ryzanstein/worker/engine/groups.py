"""The groups that the engine runs: admission, deadlines, refusals, the order of a group's choices.

This module is between the engine's commands and the scheduler, which knows only single sequences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.outcome import StepOutcome
from ryzanstein.worker.engine.plan import TokenConstraint
from ryzanstein.worker.engine.scheduling.pace import StepPace
from ryzanstein.worker.engine.scheduling.places import SequenceScheduler
from ryzanstein.worker.engine.scheduling.shedding import Shedding
from ryzanstein.worker.engine.sequence import Sequence, SequenceGroup

# After this time a client no longer expects a refusal. Most refusals come at once; few waits are
# predicted so badly.
ANNOUNCE_AFTER_S = 1.0


class Groups:
    """All groups, each from submit to the end of its last choice."""

    def __init__(self, settings: EngineSettings, scheduler: SequenceScheduler, outcome: StepOutcome, pace: StepPace) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._outcome = outcome
        self._pace = pace
        self.shedding = Shedding(settings, scheduler, pace)
        self.num_shed: Counter[str] = Counter()
        """Groups refused for lack of room or time.

        By cause: "full", "displaced", "objective" or "deadline".
        """
        self._groups: dict[int, SequenceGroup] = {}
        self._joined: list[SequenceGroup] = []
        self._num_arrived = 0
        self._num_followers = 0
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        """Returns the number of sequences that do not run.

        They are in the queue, or wait until their group's prompt is computed.
        """
        return len(self._scheduler.waiting) + self._num_followers

    def submit(self, message: SubmitGroup, now: float, constraints: SequenceOf[TokenConstraint] = ()) -> None:
        try:
            self._check(message)
            _check_followed(constraints)
            group = self._open_group(message, now)
        except RyzansteinError as error:
            self._outcome.add_failure(message.group, error)
            return
        for choice, finished in enumerate(message.finished):
            if not finished:
                self._open(Sequence(group, choice, constraints[choice] if constraints else None))
        if group.live:
            self._groups[group.id] = group
            self._next_deadline = min(self._next_deadline, _deadline(group))
            self._start_next(group)
            self._joined.append(group)
            self.shedding.joined()
        else:
            self._scheduler.waiting.close(group)

    def cancel(self, group_id: int) -> None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._num_followers -= len(group.followers)
            for sequence in group.live.values():
                self._remove(sequence)
            self._scheduler.waiting.close(group)

    def refuse(self, message: SubmitGroup, error: RyzansteinError) -> None:
        """Reports that a group is not taken."""
        self._outcome.add_failure(message.group, error)

    def fail(self, group_id: int, error: RyzansteinError) -> None:
        """Ends a group with an error; reported once, however many of its choices are at fault."""
        if group_id in self._groups:
            self.cancel(group_id)
            self._outcome.add_failure(group_id, error)

    def finish(self, group_id: int, choice: int) -> None:
        group = self._groups.get(group_id)
        if group is not None and choice in group.live:
            self.end(group.live[choice], FinishReason.STOP)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends one choice, which is complete."""
        group = sequence.group
        self._outcome.add_end(sequence, reason)
        self._remove(sequence)
        del group.live[sequence.choice]
        if sequence in group.followers:
            group.followers.remove(sequence)
            self._num_followers -= 1
        elif len(group.live) == len(group.followers) > 0:
            self._start_next(group)
        if not group.live:
            del self._groups[group.id]
            self._scheduler.waiting.close(group)

    def release_followers(self, leader: Sequence) -> None:
        """Starts the other choices once the prompt's blocks are in the prefix cache.

        So they need not compute the prompt again.
        """
        group = leader.group
        prompt_keys = leader.keys[: group.num_prompt // self._settings.block_size]
        for sequence in group.followers:
            sequence.keys = prompt_keys.copy()
            self._scheduler.add(sequence)
        self._num_followers -= len(group.followers)
        group.followers = []

    def expire(self, now: float) -> None:
        """Fails groups whose deadline has passed, running or not, and groups that wait in vain."""
        if now >= self._next_deadline:
            for group in list(self._groups.values()):
                if _deadline(group) <= now:
                    self.fail(group.id, errors.deadline_exceeded())
            self._next_deadline = min(map(_deadline, self._groups.values()), default=math.inf)
        if self._scheduler.waiting:
            for group, error in self.shedding.late(now):
                self.num_shed["deadline" if error.code is Code.DEADLINE_EXCEEDED else "objective"] += 1
                self.fail(group.id, error)
        if self._joined:
            self._announce(now)

    def _announce(self, now: float) -> None:
        """Reports groups as accepted.

        These are groups that run, or have waited for so long that their clients should know.
        """
        waiting = []
        for group in self._joined:
            if group.fresh and now - group.arrived < ANNOUNCE_AFTER_S:
                waiting.append(group)
            elif self._groups.get(group.id) is group:
                self._outcome.add_accepted(group.id)
        self._joined = [group for group in waiting if self._groups.get(group.id) is group]

    def _open_group(self, message: SubmitGroup, now: float) -> SequenceGroup:
        """Returns a new group, charged to its tenant's account.

        In a full queue other groups may have to give up their places. Raises QUEUE_FULL if none has
        to.
        """
        account = self._scheduler.waiting.open(message.priority, message.tenant if self._settings.queue.fair else "")
        group = SequenceGroup(message, self._num_arrived, now, account)
        self._num_arrived += 1
        try:
            self._make_place(group)
        except RyzansteinError:
            self._scheduler.waiting.close(group)
            raise
        return group

    def _make_place(self, group: SequenceGroup) -> None:
        bound = self._settings.queue.max_waiting
        while self.num_waiting + len(group.message.generated) > bound:
            other = self._scheduler.waiting.displaceable(group)
            error = errors.queue_full(self.num_waiting, bound, self.shedding.retry_after_s)
            self.num_shed["full" if other is None else "displaced"] += 1
            if other is None:
                raise error
            self.fail(other.group.id, error)

    def _remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ended or was cancelled.

        How long it ran helps to predict how long others will run.
        """
        if sequence in self._scheduler.running and sequence.group.pool is None:
            self._pace.end(sequence.num_begun, sequence.num_begun + sequence.num_allowed)
        self._scheduler.remove(sequence)

    def _open(self, sequence: Sequence) -> None:
        """Adds a choice.

        One of a continuation may have nothing left to generate and ends at once.
        """
        reason = sequence.end_reason()
        if reason is not None:
            self._outcome.add_end(sequence, reason)
            return
        sequence.group.live[sequence.choice] = sequence
        sequence.group.followers.append(sequence)
        self._num_followers += 1

    def _start_next(self, group: SequenceGroup) -> None:
        self._num_followers -= 1
        self._scheduler.add(group.followers.pop(0))

    def _check(self, message: SubmitGroup) -> None:
        num_prompt = len(message.prompt_ids)
        num_choices = len(message.generated)
        if message.group in self._groups:
            raise errors.already_exists("group", str(message.group))
        if num_prompt == 0:
            raise errors.invalid("prompt", "must have at least one token")
        if message.max_tokens < 1:
            raise errors.invalid("sampling.max_tokens", "must be at least 1", message.max_tokens)
        if num_choices != message.sampling.n or num_choices != len(message.finished):
            raise errors.invalid("generated", f"must have n ({message.sampling.n}) choices", num_choices)
        self._check_room(num_prompt, message.max_tokens)

    def _check_room(self, num_prompt: int, max_tokens: int) -> None:
        """Checks that the group fits the pool.

        The last token of an answer needs no place: it is never fed.
        """
        num_tokens = self._settings.extents.tokens_in(self._settings.num_blocks)
        if num_prompt + max_tokens - 1 > num_tokens:
            raise errors.context_too_long(num_prompt, max_tokens, num_tokens)


def _deadline(group: SequenceGroup) -> float:
    deadline = group.message.deadline
    return math.inf if deadline is None else deadline


def _check_followed(constraints: SequenceOf[TokenConstraint]) -> None:
    """Raises an error if the tokens of earlier attempts do not satisfy their constraints."""
    for constraint in constraints:
        if constraint.failure:
            raise errors.constraint_failed(constraint.failure)
