"""How an answer is read to its end, over as many streams and routers as that takes. No IO: a driver does what it says.

A driver asks `next`, does that, and tells what came: `got` for each event, then `ended` or `lost`. All times are of the
driver's monotonic clock, in seconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.client import errors
from ryzanstein.client.answer import Answer, Position
from ryzanstein.client.errors import ClientError
from ryzanstein.client.events import Event, Reattached, Started
from ryzanstein.client.following.reading import AnswerReader, OutOfOrder
from ryzanstein.client.following.retries import Bounds, Retries
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.v1 import inference_pb2 as pb

_LATER_S = 1.0
"""A reader that attaches waits so much longer than the deadline: the server's own error comes first, and says more."""
_GAPS = 1
_STALL_DOUBLINGS = 3
"""A long prompt is silent at every router: each router that is left for its silence without a token is given more time."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Send the request to this router, and read. `keyed`: with its idempotency key."""

    router: str
    timeout_s: float | None
    keyed: bool = True


@dataclass(frozen=True, slots=True)
class Attach:
    """Attach to the generation at this router, and read."""

    router: str
    timeout_s: float | None
    request: pb.AttachGenerationRequest


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete, or was cancelled as its reader wished."""


Step = Begin | Attach | Wait | Done


class Flow:
    """One answer."""

    def __init__(
        self,
        routers: RouterChoice,
        bounds: Bounds,
        *,
        num_choices: int = 1,
        position: Position | None = None,
        own_key: bool = False,
        rng: random.Random | None = None,
        now: float | None = None,
    ) -> None:
        """`position`: the generation was begun elsewhere; only attach. `own_key`: the request's key is not the user's."""
        now = time.monotonic() if now is None else now
        self._routers, self._bounds = routers, bounds
        self._retries = Retries(routers, bounds, rng or random.Random())
        self._reader = AnswerReader(num_choices, now, position)
        self._router, self._wait_until = "", 0.0
        self._has_started, self._may_resend = False, position is None
        self._keyed, self._may_drop_key = True, own_key
        self._gaps = self._stalls = 0
        self._error: ClientError | None = None
        self._cancelled = False
        self.reading = False
        """Whether a stream is open whose events count. A driver leaves a stream when this becomes false."""
        self.heard_at = now

    @property
    def answer(self) -> Answer:
        return self._reader.answer

    @property
    def position(self) -> Position:
        return self._reader.position

    @property
    def over(self) -> bool:
        """Whether there is nothing more to read."""
        return self._error is not None or self._reader.complete or (self._cancelled and not self.reading)

    @property
    def router(self) -> str:
        """Returns the router that was asked last."""
        return self._router

    def stalls_in(self, now: float) -> float:
        """Returns after how many seconds of further silence to leave the router.

        It is not left where it is the only one, or has not said the generation's id.
        """
        stall_s = self._bounds.stall_s
        if len(self._routers.addresses) == 1 or not self.answer.generation_id:
            return stall_s
        return stall_s * 2.0 ** min(self._stalls, _STALL_DOUBLINGS) - (now - self.heard_at)

    def next(self, now: float) -> Step:
        """Returns what to do. Raises the error with which the answer ended."""
        if self._error is not None:
            raise self._error
        if self._reader.complete or self._cancelled:
            self._reader.cancelled()
            return Done()
        if now < self._wait_until:
            return Wait(self._wait_until - now)
        self._router = self._routers.current(now)
        self.reading, self.heard_at = True, now
        left_s = None if self._bounds.deadline is None else max(0.001, self._bounds.deadline - now)
        if not self.answer.generation_id:
            return Begin(self._router, left_s, self._keyed)
        later_s = None if left_s is None else left_s + _LATER_S
        position = self._reader.position
        from_index = dict(enumerate(position.next_index))
        attach = pb.AttachGenerationRequest(generation_id=position.generation_id, from_index=from_index)
        return Attach(self._router, later_s, attach)

    def got(self, event: pb.GenerationEvent, now: float) -> Sequence[Event]:
        """Returns what an event says to people who read the answer."""
        self.heard_at = now
        try:
            found = self._reader.read(event, now)
        except OutOfOrder as error:
            self._out_of_order(str(error), now)
            return ()
        self._retries.heard(self._router)
        if found and isinstance(found[0], Started):
            if self._has_started:
                self.answer.reattaches += 1
                return [Reattached(self._router)]
            self._has_started = True
        elif event.HasField("delta"):
            self._gaps = self._stalls = 0
        return found

    def ended(self, now: float) -> None:
        """The stream ended without an error."""
        if self._reader.complete:
            self.reading = False
        elif self.reading:
            self.lost(RyzansteinError("the stream ended before the answer did", Code.UNAVAILABLE, ""), now)

    def lost(self, error: RyzansteinError, now: float) -> None:
        """The stream failed. The error's reason is empty where the transport did."""
        self.reading = False
        if self._cancelled or self._reader.complete:
            return
        begun = bool(self.answer.generation_id)
        if not begun and self._drops_key(error):
            return
        try:
            if not begun and not self._keyed and not error.reason:
                raise errors.RouterUnreachable.of(error)  # it may run: sent again without a key it could run twice
            self._wait_until = now + self._retries.failed(error, self._router, now, begun=begun)
        except ClientError as raised:
            self._end(raised, now)

    def stalled(self, now: float) -> None:
        """The router has been silent for too long."""
        self._stalls += 1
        self.lost(RyzansteinError(f"silent for {now - self.heard_at:.1f} s", Code.UNAVAILABLE, ""), now)

    def cancel(self) -> None:
        """The reader wants no more. What still comes on an open stream counts."""
        self._cancelled = True

    def give_up(self) -> None:
        """What has not come by now does not count."""
        self._cancelled, self.reading = True, False

    def fail(self, error: ClientError) -> None:
        """Ends with an error that is not of a router, unless the answer has ended."""
        if not self.over:
            error.partial, self._error, self.reading = self.answer, error, False

    def _drops_key(self, error: RyzansteinError) -> bool:
        """Does without the client's own key while the store that keeps keys is away. What was refused for that runs nowhere."""
        drops = self._keyed and self._may_drop_key and error.reason == "JOURNAL_UNAVAILABLE"
        self._keyed = self._keyed and not drops
        return drops

    def _end(self, error: ClientError, now: float) -> None:
        """Ends with an error, unless the request may be sent again: no router knows the generation, and no token of it came."""
        if isinstance(error, errors.NotFound) and self._has_started:
            if self._may_resend and not any(choice.token_ids for choice in self.answer.choices):
                self.answer.generation_id = self.answer.accepted_by = ""
                self._may_resend, self._wait_until = False, now
                return
            error = errors.AnswerLost.of(error)
        error.partial = self.answer
        self._error = error

    def _out_of_order(self, message: str, now: float) -> None:
        """Attaches once at the next index; a second time in a row it is an error. No index is skipped, and no text cut."""
        self.reading = False
        self._gaps += 1
        if self._gaps > _GAPS:
            error = errors.ProtocolError(message, Code.INTERNAL, "")
            error.partial = self.answer
            self._error = error
        self._wait_until = now
