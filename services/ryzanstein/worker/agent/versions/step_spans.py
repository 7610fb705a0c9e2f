"""The spans of steps and of what each rank did in them, for generations that are traced.

They are made after the step, from what the ranks record on their board: no trace context travels to a rank, and slow steps
are chosen when they are known to be slow. Shown are all steps of a prompt, and of the tokens after it the first, every 32nd
and those that took three times as long as usual.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span

from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.worker.engine.messages import StepEvents
from ryzanstein.worker.supervision.group import RankStep

_EVERY = 32
_SLOW = 3.0
_USUAL_SHARE = 0.1
_MOST_PER_S = 500
_MOST_WAITING = 256
_MOMENT_S = 0.05


@dataclass(slots=True)
class _Traced:
    """A generation that is traced. `phase` is the trace context of what it is doing; `usual_s` of its last steps' mean."""

    phase: str
    decodes: bool = False
    num_steps: int = 0
    usual_s: float = 0.0

    def shows(self, step_s: float) -> bool:
        """Counts a step; returns whether it is shown."""
        if not self.decodes:
            return True
        slow = self.num_steps > 1 and step_s > _SLOW * self.usual_s
        if not slow:
            self.usual_s += (step_s - self.usual_s) * (_USUAL_SHARE if self.usual_s else 1.0)
        self.num_steps += 1
        return slow or self.num_steps % _EVERY == 1


class StepSpans:
    """Makes the spans. `steps` returns what the ranks did in a step."""

    def __init__(self, tracing: Tracing, steps: Callable[[int], Sequence[RankStep]]) -> None:
        self._tracing, self._steps = tracing, steps
        self._traced: dict[int, _Traced] = {}
        self._waiting: deque[tuple[int, str]] = deque(maxlen=_MOST_WAITING)
        self._second, self._left = 0, 0
        self.num_dropped = 0

    def begin(self, group: int, phase: Span, *, decodes: bool = False) -> None:
        """Traces what a generation does from now on, if its spans are recorded."""
        if phase.is_recording():
            self._traced[group] = _Traced(traceparent(phase), decodes)

    def end(self, group: int) -> None:
        """Ends that. Nothing may come after its last step for long: that one's spans are made in a moment."""
        if self._traced.pop(group, None) is not None and self._waiting:
            asyncio.get_running_loop().call_later(_MOMENT_S, self._make)

    def on_step(self, events: StepEvents) -> None:
        """Takes a step that is over. Ranks may still be writing about it: its spans are made after the next one."""
        if self._waiting:
            self._make()
        if not self._traced:
            return
        fed = {*events.groups, *(group for group, _ in events.prefilled)}
        for group in fed & self._traced.keys():
            traced = self._traced[group]
            if traced.shows(events.step_s):
                self._waiting.append((events.step, traced.phase))

    def _make(self) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()
        while self._waiting:
            step, parent = self._waiting.popleft()
            if (ranks := self._steps(step)) and self._may(1 + 2 * len(ranks)):
                self._step(step, parent, ranks, offset_ns)

    def _step(self, step: int, parent: str, ranks: Sequence[RankStep], offset_ns: int) -> None:
        began, ended = min(rank.begun_s for rank in ranks), max(rank.ended_s for rank in ranks)
        about = {"ryzanstein.step": step, "ryzanstein.tokens": ranks[0].num_tokens}
        span = self._tracing.start("step", parent, about, began_ns=_ns(began, offset_ns))
        context = traceparent(span)
        for rank in ranks:
            self._rank(rank, context, offset_ns)
        span.end(_ns(ended, offset_ns))

    def _rank(self, rank: RankStep, parent: str, offset_ns: int) -> None:
        spent = {"compute_s": rank.compute_s, "collective_s": rank.collective_s, "tail_s": rank.tail_s}
        about: dict[str, str | int | float] = {f"ryzanstein.{name}": round(value, 9) for name, value in spent.items()}
        name = f"rank {rank.rank}"
        span = self._tracing.start(name, parent, {"ryzanstein.rank": rank.rank, **about}, began_ns=_ns(rank.begun_s, offset_ns))
        if (wait := rank.longest) is not None:
            about = {"ryzanstein.collective": wait.number}
            if wait.last is not None:
                about["ryzanstein.late_rank"] = wait.last
            inner = self._tracing.start(wait.op, traceparent(span), about, began_ns=_ns(wait.began_s, offset_ns))
            inner.end(_ns(wait.began_s + wait.took_s, offset_ns))
        span.end(_ns(rank.ended_s, offset_ns))

    def _may(self, num_spans: int) -> bool:
        """Returns whether there is room for these spans in this second; counts those that are dropped."""
        if (second := int(time.monotonic())) != self._second:
            self._second, self._left = second, _MOST_PER_S
        if num_spans > self._left:
            self.num_dropped += num_spans
            return False
        self._left -= num_spans
        return True


def _ns(at_s: float, offset_ns: int) -> int:
    """Returns the Unix time of a moment of the monotonic clock."""
    return int(at_s * 1e9) + offset_ns
