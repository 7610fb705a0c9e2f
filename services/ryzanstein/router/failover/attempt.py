"""One attempt of a generation on one node.

Tokens go straight into the log; everything else becomes an event for the runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from ryzanstein.cluster import Load, TokenOrigin
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.tokens import FinishReason, NodeMove, PromptScores, Token
from ryzanstein.router.failover.patience import Quiet
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.generations.token_log import AppendResult, ChoiceLog, GapError
from ryzanstein.router.nodes.breaker import Blame, blame
from ryzanstein.router.nodes.links.connection import PROTOCOL
from ryzanstein.router.nodes.roster import AttemptPlacement
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

NODE_FAULT = "node_fault"
BACK_PRESSURE = "back_pressure"
REQUEST_FAULT = "request_fault"
NO_PROGRESS = "no_progress"
# The node works, but slowly, and another node may be faster.
SLOW = "slow"
# The node cannot run such a request; another node has accepted it or may be able to run it.
REFUSED = "refused"
# The node kept another part of a prompt that does not fit than the attempt that was accepted first.
OTHER_PROMPT = "other_prompt"


# So many steps of a node without a token or a part of the prompt are no coincidence.
_STEPS_WITHOUT = 8


@dataclass(frozen=True, slots=True)
class Worked:
    """The attempt produced something new, for the first time or for the first time in a race."""

    run: AttemptRun


@dataclass(frozen=True, slots=True)
class Suspected:
    """The attempt's node is silent or stalled. Tokens of the attempt are still accepted."""

    run: AttemptRun
    cause: str
    at: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt ended before the generation was complete; another node may continue."""

    run: AttemptRun
    cause: str
    at: float
    error: RyzansteinError | None = None

    @property
    def reason(self) -> str:
        """The reason that the node gave, or an empty string."""
        return "" if self.error is None else self.error.reason


@dataclass(frozen=True, slots=True)
class Rejected:
    """The node reports that the request is wrong.

    The runner decides whether that ends the generation.
    """

    run: AttemptRun
    error: RyzansteinError


@dataclass(frozen=True, slots=True)
class Complete:
    """Every choice has ended."""

    run: AttemptRun


AttemptEvent = Worked | Suspected | Lost | Rejected | Complete


class AttemptRun:
    """An `AttemptSink` that writes to the generation's log and passes its events to `tell`."""

    def __init__(
        self,
        generation: Generation,
        attempt: int,
        node_id: str,
        telemetry: RouterTelemetry,
        tell: Callable[[AttemptEvent], None],
        *,
        cause: str = "",
    ) -> None:
        """`cause`: why an attempt before this one was not enough; empty: there was none."""
        self._cause = cause
        self.attempt = attempt
        self.node_id = node_id
        self.placement: AttemptPlacement | None = None
        self.origin = TokenOrigin()
        """The version that accepted the attempt: its node may have another one before the attempt ends."""
        self.on_submitted: Callable[[float], None] | None = None
        self.described_prompt = generation.started is not None
        """Its node was told how much of the prompt to keep: an attempt had been accepted before."""
        self._generation = generation
        self._log = generation.log
        self._telemetry = telemetry
        self._tell = tell
        self._worked = False
        self._submitted_at: float | None = None
        self._quiet_since = time.monotonic()
        self._prompt_tokens: int | None = None
        self._num_computed = 0
        self._begun = False
        self._preempted: set[int] = set()
        self._alarms = 0
        self._step_at_alarm = 0

    def submitted(self, at: float) -> None:
        self._submitted_at = at
        if self.on_submitted is not None:
            self.on_submitted(at)

    def preparing(self) -> None:
        if self._prompt_tokens is None:
            self._quiet_since = time.monotonic()

    def accepted(self, prompt_tokens: int, reply: ReplyStyle | None = None, omitted: int = 0) -> None:
        if self._submitted_at is not None:
            self._telemetry.accept.labels(self.node_id).observe(time.monotonic() - self._submitted_at)
        if not self._generation.reads(prompt_tokens, omitted):
            self._read_another_prompt(prompt_tokens)
            return
        self._prompt_tokens, self._quiet_since = prompt_tokens, time.monotonic()
        if self.placement is not None:
            self.origin = self.placement.link.origin
        self._generation.start(self.node_id, prompt_tokens, reply, omitted)

    def progressed(self, num_tokens: int) -> None:
        self._num_computed, self._quiet_since, self._alarms = num_tokens, time.monotonic(), 0

    def learned_origin(self) -> TokenOrigin:
        """Returns where the attempt's tokens are from, with what its node has said of that since it accepted."""
        if self.placement is not None:
            self.origin = self.origin.completed(self.placement.link.origin)
        return self.origin

    def _read_another_prompt(self, prompt_tokens: int) -> None:
        """Drops the attempt before its first row: its tokens would continue another prompt."""
        log.warning("node kept another part of the prompt", node_id=self.node_id, attempt=self.attempt, kept=prompt_tokens)
        self._telemetry.prompts.read_otherwise(self._generation.request.model)
        self.abandon()
        self._tell(Lost(self, OTHER_PROMPT, time.monotonic()))

    def scored(self, scores: PromptScores) -> None:
        try:
            self._generation.score(scores)
        except ValueError as gap:
            self._broke_protocol(gap)
        self._quiet_since = time.monotonic()

    def _note_move(self, log: ChoiceLog, index: int) -> None:
        """Notes how the choice came here, if the token at this index is its first one of another node."""
        if len(log.nodes) > 1 and log.nodes[-1][0] == index:
            silent_s = time.monotonic() - self._generation.times.last_token_at
            log.moves[index] = NodeMove(log.nodes[-2][1], self._cause, silent_s, self.attempt)

    def token(self, choice: int, index: int, token: Token) -> bool:
        try:
            row = self._log.append(self.attempt, choice, index, token, self.node_id)
        except GapError as gap:
            self._broke_protocol(gap)
            return False
        if row is not AppendResult.NEW:
            self._telemetry.dropped_rows.labels(row.name.lower()).inc()
            return False
        if self._cause:
            self._note_move(self._log.choices[choice], index)
        self._generation.token_added()
        if self._log.complete:  # the answer may not be longer
            self._works()
            if self.placement is not None:
                self.placement.cancel()
            self._tell(Complete(self))
            return True
        self._quiet_since = self._generation.times.last_token_at
        if self._preempted:
            self._preempted.discard(choice)
        self._works()
        return True

    def _works(self) -> None:
        if not self._worked:
            self._worked = self._begun = True
            self._alarms = 0
            if self.placement is not None:
                self.placement.began()
            self._tell(Worked(self))

    def race(self) -> None:
        """Starts a race with another attempt: the next new token is reported again."""
        self._worked = False

    def finished(self, choice: int, reason: FinishReason, cached_prompt_tokens: int) -> None:
        try:
            row = self._log.finish(self.attempt, choice, reason)
        except GapError as gap:
            self._broke_protocol(gap)
            return
        self._preempted.discard(choice)
        if row is AppendResult.NEW:
            self._works()
            self._generation.end_choice(choice, cached_prompt_tokens)
            if self._log.complete:
                self._tell(Complete(self))

    def preempted(self, choice: int) -> None:
        if choice < self._generation.request.sampling.n:
            self._preempted.add(choice)
            self._num_computed = 0  # all of it is computed again

    def failed(self, error: RyzansteinError, node_fault: bool) -> None:
        self.release()
        match blame(error.code, node_fault, error.reason):
            case Blame.CLIENT:
                self._tell(Rejected(self, error))
            case Blame.BACK_PRESSURE:
                self._tell(Lost(self, BACK_PRESSURE, time.monotonic(), error))
            case Blame.REQUEST:
                self._tell(Lost(self, REQUEST_FAULT, time.monotonic(), error))
            case Blame.NODE:
                self._tell(Lost(self, NODE_FAULT, time.monotonic(), error))

    def suspected(self, cause: str, at: float) -> None:
        self._tell(Suspected(self, cause, at))

    def lost(self, cause: str, at: float) -> None:
        self._log.fence(self.attempt)
        self._tell(Lost(self, cause, at))

    @property
    def moved_at(self) -> float:
        """See `RunningAttempt.moved_at`."""
        return self._quiet_since

    @property
    def was_accepted(self) -> bool:
        """True when its node has accepted it."""
        return self._prompt_tokens is not None

    @property
    def fruitful(self) -> bool:
        """True when it has produced something new."""
        return self._begun

    @property
    def suspect(self) -> bool:
        """True while its node is silent or stalled."""
        return self.placement is not None and self.placement.link.suspected

    @property
    def quiet(self) -> Quiet:
        """Since when it has produced nothing, and what may excuse that."""
        placement = self.placement
        load = Load() if placement is None else placement.link.beat.load
        if self._prompt_tokens is None:
            return Quiet(self._quiet_since, None, load)
        # A preempted choice computes again what it had.
        again = self._prompt_tokens + self._log.num_tokens if self._preempted else 0
        return Quiet(
            self._quiet_since,
            max(0, (again if self._begun else self._prompt_tokens) - self._num_computed),
            load,
            overtaken=placement is not None and placement.overtaken,
            preempted=bool(self._preempted),
        )

    def wait(self) -> None:
        """Records that the attempt waits in its node's queue, or is slow there: only time after that counts."""
        self._quiet_since = time.monotonic()

    @property
    def alarmed(self) -> bool:
        """True after the first alarm, until the attempt makes progress again."""
        return self._alarms > 0

    @property
    def forgotten(self) -> bool:
        """Whether the node works, but not on this attempt.

        It never accepted the attempt, or it has run steps since the alarm in which the attempt made
        no progress. A node that has run none is slow or stalled: its own watchdog decides that.
        """
        if self._prompt_tokens is None or self.placement is None:
            return True
        return self.placement.link.beat.step >= self._step_at_alarm + _STEPS_WITHOUT

    def alarm(self) -> None:
        """Reports that the attempt has been quiet for too long: another node may try beside it."""
        now = self._quiet_since = time.monotonic()
        self._alarms += 1
        self._worked = False  # so that the next token ends the alarm
        self._step_at_alarm = 0 if self.placement is None else self.placement.link.beat.step
        self._tell(Suspected(self, NO_PROGRESS, now))

    def give_up(self, cause: str) -> None:
        """Reports the attempt as lost after it was quiet for too long again."""
        self.abandon()
        self._tell(Lost(self, cause, time.monotonic()))

    def abandon(self) -> None:
        """Cancels the attempt on its node and fences it off."""
        self._log.fence(self.attempt)
        if self.placement is not None:
            self.placement.cancel()

    def release(self) -> None:
        """Fences off an attempt that has already ended on its node."""
        self._log.fence(self.attempt)
        if self.placement is not None:
            self.placement.release()

    def _broke_protocol(self, gap: GapError | ValueError) -> None:
        log.error("node broke the protocol", node_id=self.node_id, attempt=self.attempt, what=str(gap))
        self.abandon()
        self._tell(Lost(self, PROTOCOL, time.monotonic()))
