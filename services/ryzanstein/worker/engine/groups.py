"""The groups that the engine runs: admission, deadlines, and the order in which a group's choices start.

Between the engine's commands and the scheduler, which knows single sequences only.
"""

from __future__ import annotations

import math

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import FinishReason
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.outcome import Outcome
from ryzanstein.worker.engine.scheduler import Scheduler
from ryzanstein.worker.engine.sequence import Group, Sequence
from ryzanstein.worker.engine.settings import EngineSettings


class Groups:
    """Every group from submit to its last choice's end."""

    def __init__(self, settings: EngineSettings, scheduler: Scheduler, outcome: Outcome) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._outcome = outcome
        self._groups: dict[int, Group] = {}
        self._num_arrived = 0
        self._num_followers = 0
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run: in the line, or until their group's prompt is computed."""
        return len(self._scheduler.waiting) + self._num_followers

    def submit(self, message: SubmitGroup) -> None:
        try:
            self._check(message)
        except RyzansteinError as error:
            self._outcome.add_failure(message.group, error)
            return
        group = Group(message, self._num_arrived)
        self._num_arrived += 1
        for choice, finished in enumerate(message.finished):
            if not finished:
                self._open(Sequence(group, choice))
        if group.live:
            self._groups[group.id] = group
            self._next_deadline = min(self._next_deadline, _deadline(group))
            self._start_next(group)

    def cancel(self, group_id: int) -> None:
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._num_followers -= len(group.followers)
            for sequence in group.live.values():
                self._scheduler.remove(sequence)

    def fail(self, group_id: int, error: RyzansteinError) -> None:
        """Ends a group with an error; said once, however many of its choices are at fault."""
        if group_id in self._groups:
            self.cancel(group_id)
            self._outcome.add_failure(group_id, error)

    def finish(self, group_id: int, choice: int) -> None:
        group = self._groups.get(group_id)
        if group is not None and choice in group.live:
            self.end(group.live[choice], FinishReason.STOP)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """One choice is complete."""
        group = sequence.group
        self._outcome.add_end(sequence, reason)
        self._scheduler.remove(sequence)
        del group.live[sequence.choice]
        if sequence in group.followers:
            group.followers.remove(sequence)
            self._num_followers -= 1
        elif len(group.live) == len(group.followers) > 0:
            self._start_next(group)
        if not group.live:
            del self._groups[group.id]

    def release_followers(self, leader: Sequence) -> None:
        """The prompt's blocks are in the prefix cache now: the other choices need not compute them."""
        group = leader.group
        prompt_keys = leader.keys[: group.num_prompt // self._settings.block_size]
        for sequence in group.followers:
            sequence.keys = prompt_keys.copy()
            self._scheduler.add(sequence)
        self._num_followers -= len(group.followers)
        group.followers = []

    def expire(self, now: float) -> None:
        """Fails the groups whose deadline has passed, running or not."""
        if now < self._next_deadline:
            return
        for group in list(self._groups.values()):
            if _deadline(group) <= now:
                self.fail(group.id, errors.deadline_exceeded())
        self._next_deadline = min(map(_deadline, self._groups.values()), default=math.inf)

    def _open(self, sequence: Sequence) -> None:
        """A choice of a continuation may have nothing left to generate."""
        reason = sequence.end_reason()
        if reason is not None:
            self._outcome.add_end(sequence, reason)
            return
        sequence.group.live[sequence.choice] = sequence
        sequence.group.followers.append(sequence)
        self._num_followers += 1

    def _start_next(self, group: Group) -> None:
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
        if self.num_waiting + num_choices > self._settings.max_waiting:
            raise errors.queue_full(self.num_waiting, self._settings.max_waiting)

    def _check_room(self, num_prompt: int, max_tokens: int) -> None:
        """The last token of an answer needs no room: it is never fed."""
        num_tokens = self._settings.num_blocks * self._settings.block_size
        if num_prompt + max_tokens - 1 > num_tokens:
            raise errors.context_too_long(num_prompt, max_tokens, num_tokens)


def _deadline(group: Group) -> float:
    deadline = group.message.deadline
    return math.inf if deadline is None else deadline
