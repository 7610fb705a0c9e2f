"""What waits to be sent to one router.

That is the columns of the next StepOutput, the newest beat, and the acknowledgement of the router's
own beats. Steps add rows without ever waiting. The stream's writer sends all that has accumulated
since its last write as one frame, so a router that reads slowly gets fewer and larger frames.
Beyond a bound the link is closed; the engine is not affected.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from ryzanstein.cluster import Beat
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.tokens import FinishReason, PromptScores, Token
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.events import logprobs_to_wire, scores_to_wire, style_to_wire
from ryzanstein.wire.membership import beat_to_wire
from ryzanstein.wire.timestamps import timestamp
from ryzanstein.worker.tuning import LinkBounds

_OVERFLOW = "LINK_OVERFLOW"
_ROW_BYTES = 16  # approximate size of a row without its text
_TOP_BYTES = 24
_MESSAGE_BYTES = 64
_TELL_PREPARING_S = 0.5
# A router that had no attempt here for so long hears little of the node until it has one.
QUIET_AFTER_S = 10.0
_SHORTEST_QUIET_S, _LONGEST_QUIET_S = 0.5, 10.0
_LATE = 1.25  # a router's beat is due, and with it the answer; beyond this the node beats without it
_MOST_PREPARING_S = 300.0


class RouterLink:
    """A router's stream. `frames` is its writer; the node calls everything else, in the same loop.

    Over its bounds it closes itself with RESOURCE_EXHAUSTED. What is added to a closed link is
    dropped.
    """

    def __init__(self, router_id: str, bounds: LinkBounds, quiet_s: float = 0.0) -> None:
        """`quiet_s`: how seldom beats may come while the router has no work here; 0: as often as ever."""
        self.router_id = router_id
        self.quiet = False
        """Beats come seldom now."""
        self.quiet_s = min(max(quiet_s, _SHORTEST_QUIET_S), _LONGEST_QUIET_S) if quiet_s > 0 else 0.0
        self._worked_at = self._beaten_at = time.monotonic()
        self._latest: Beat | None = None
        self._told: tuple[object, ...] = ()
        self.handles: dict[int, int] = {}  # handle to group number
        self._preparing: dict[int, float] = {}  # handle to monotonic seconds, until when
        self._reported_preparing_s = 0.0
        self._bounds = bounds
        self._output = worker.StepOutput()
        self._rows = 0
        self._bytes = 0
        self._beat: Beat | None = None
        self._to_acknowledge = 0
        self._adapters: worker.NodeAdapters | None = None
        self._error: RyzansteinError | None = None
        self._closed = False
        self._ending = False
        self._changed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def overflowed(self) -> bool:
        """Returns whether the link closed itself because it was over its bounds."""
        return self._error is not None and self._error.reason == _OVERFLOW

    def prepare(self, handle: int) -> None:
        """Tells the router with its beats, for a bounded time, that this attempt is not forgotten, until it is `prepared`."""
        self._preparing.setdefault(handle, time.monotonic() + _MOST_PREPARING_S)
        if self.quiet and self._latest is not None:
            self.beat(self._latest)

    def handed_over(self, handle: int) -> None:
        """Tells the same of an attempt that the ranks have. The watchdog bounds how long they may take."""
        self._preparing[handle] = math.inf

    def prepared(self, handle: int) -> None:
        self._preparing.pop(handle, None)

    def accept(self, handle: int, prompt_tokens: int, reply: ReplyStyle | None = None, omitted: int = 0) -> None:
        self.prepared(handle)
        accepted = self._output.accepted.add(handle=handle, prompt_tokens=prompt_tokens, omitted_prompt_tokens=omitted)
        if reply is not None:
            accepted.reply.CopyFrom(style_to_wire(reply))
        self._added(_ROW_BYTES)

    def add_row(self, handle: int, choice: int, index: int, token: Token) -> None:
        output, size = self._output, _ROW_BYTES + len(token.text)
        if token.logprobs is not None:
            output.logprob_row.append(len(output.handle))
            output.logprobs.append(logprobs_to_wire(token.logprobs))
            size += _TOP_BYTES * (1 + len(token.logprobs.top))
        output.handle.append(handle)
        output.choice.append(choice)
        output.index.append(index)
        output.token_id.append(token.token_id)
        output.text.append(token.text)
        self._added(size)

    def finish(self, handle: int, choice: int, reason: FinishReason, cached_prompt_tokens: int) -> None:
        number = worker.ChoiceFinished(handle=handle, choice=choice, cached_prompt_tokens=cached_prompt_tokens)
        number.reason = int(reason)  # type: ignore[assignment]
        self._output.finished.append(number)
        self._added(_ROW_BYTES)

    def score(self, handle: int, scores: PromptScores) -> None:
        self._output.prompt_parts.add(handle=handle).prompt.CopyFrom(scores_to_wire(scores))
        for token in scores.tokens:
            self._added(_ROW_BYTES + len(token.text) + _TOP_BYTES * (1 + len(token.top)))

    def progress(self, handle: int, num_tokens: int) -> None:
        self._output.prompt_progress.add(handle=handle, tokens=num_tokens)
        self._added(_ROW_BYTES)

    def preempt(self, handle: int, choice: int) -> None:
        self._output.preempted.add(handle=handle, choice=choice)
        self._added(_ROW_BYTES)

    def fail(self, handle: int, error: RyzansteinError, *, node_fault: bool) -> None:
        self.prepared(handle)
        metadata = dict(error.metadata)
        if error.resource is not None:
            metadata.setdefault(*error.resource)
        failed = self._output.failed.add(
            handle=handle,
            code=int(error.code),
            reason=error.reason,
            message=error.message,
            metadata=metadata,
            node_fault=node_fault,
        )
        if error.retry_after_s is not None:
            failed.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        self._added(_MESSAGE_BYTES + len(error.message))

    def end_step(self, step: int) -> None:
        """Marks the end of a step's rows."""
        self._output.step = step

    def beat(self, beat: Beat) -> None:
        """Sends a beat, on a quiet link only one that says something new or is late. Replaces one that is not sent yet."""
        now = time.monotonic()
        if self.handles or self._preparing:
            self._worked_at = now
        self._latest, was_quiet = beat, self.quiet
        self.quiet = bool(self.quiet_s) and now - self._worked_at >= QUIET_AFTER_S
        due = now - self._beaten_at >= _LATE * self.quiet_s
        if due or not (self.quiet and was_quiet) or _news(beat) != self._told:
            self._send(beat, now)

    def _send(self, beat: Beat, now: float) -> None:
        self._beat, self._told, self._beaten_at = beat, _news(beat), now
        self._changed.set()

    def acknowledge(self, sequence: int) -> None:
        """Acknowledges a beat of the router, on a quiet link with a beat. Replaces an acknowledgement that is not sent yet."""
        self._to_acknowledge = sequence
        if self.quiet and self._latest is not None:
            self._send(self._latest, time.monotonic())
        self._changed.set()

    def report(self, adapters: worker.NodeAdapters) -> None:
        """Sends what adapters the node has, or which of them have changed."""
        if adapters.whole or self._adapters is None:
            self._adapters = worker.NodeAdapters()
            self._adapters.CopyFrom(adapters)  # the message is for all routers
        else:
            _add_reports(self._adapters, adapters)
        self._changed.set()

    def end(self) -> None:
        """Ends `frames` when what waits has been sent."""
        self._ending = True
        self._changed.set()

    def close(self, error: RyzansteinError | None = None) -> None:
        """Ends `frames`, with or without an error. What waits is dropped."""
        self._closed, self._error = True, self._error or error
        self._take()
        self._beat = None
        self._changed.set()

    async def frames(self) -> AsyncIterator[worker.ConnectResponse]:
        """Yields frames as they become available, until `close` or `end`."""
        while not self._closed:
            await self._changed.wait()
            self._changed.clear()
            ending = self._ending
            if self._to_acknowledge and not (self.quiet and self._beat is not None):
                sequence, self._to_acknowledge = self._to_acknowledge, 0
                yield worker.ConnectResponse(ack=worker.RouterBeatAck(sequence=sequence))
            if self._adapters is not None:
                adapters, self._adapters = self._adapters, None
                yield worker.ConnectResponse(adapters=adapters)
            if self._rows:
                yield worker.ConnectResponse(output=self._take())
            if self._beat is not None:
                beat, self._beat = self._beat, None
                yield worker.ConnectResponse(beat=self._with_preparing(self._written(beat)))
            if ending:
                self.close()
        if self._error is not None:
            raise self._error

    def _written(self, beat: Beat) -> worker.Beat:
        wire = beat_to_wire(beat)
        if self.quiet:
            wire.quiet, wire.ack, self._to_acknowledge = True, self._to_acknowledge, 0
            wire.time.CopyFrom(timestamp(time.time()))  # it may be an older one that is said again
        return wire

    def _with_preparing(self, beat: worker.Beat) -> worker.Beat:
        now = time.monotonic()
        if self._preparing and now >= self._reported_preparing_s + _TELL_PREPARING_S:
            self._reported_preparing_s = now
            beat.preparing.extend(handle for handle, until in self._preparing.items() if now < until)
        return beat

    def _take(self) -> worker.StepOutput:
        output, self._output = self._output, worker.StepOutput()
        self._rows = self._bytes = 0
        return output

    def _added(self, size: int) -> None:
        self._rows += 1
        self._bytes += size
        self._changed.set()
        if self._closed:
            self._take()
        elif self._rows > self._bounds.rows or self._bytes > self._bounds.bytes:
            text = f"router {self.router_id} reads too slowly: {self._rows} rows (about {self._bytes} bytes) are unsent"
            self.close(RyzansteinError(text, Code.RESOURCE_EXHAUSTED, _OVERFLOW, {"rows": str(self._rows)}))


def _news(beat: Beat) -> tuple[object, ...]:
    """Returns the part of a beat that is sent at once when it changes, even on a quiet link."""
    load = beat.load
    full = load.running + load.waiting >= load.capacity
    constant = (beat.other_models, beat.numerics, beat.sampling_defaults, beat.engine, beat.reserve)
    return beat.state, beat.model, beat.context_length, beat.reason, beat.profiling, full, constant


def _add_reports(reports: worker.NodeAdapters, newer: worker.NodeAdapters) -> None:
    """Adds newer reports to those that wait. They stay as few as there are adapters: of each the newest counts."""
    names = {each.adapter.name for each in newer.adapters}
    if any(each.adapter.name in names for each in reports.adapters):
        kept = [each for each in reports.adapters if each.adapter.name not in names]
        del reports.adapters[:]
        reports.adapters.extend(kept)
    reports.adapters.extend(newer.adapters)
    reports.replaced.extend(newer.replaced)
