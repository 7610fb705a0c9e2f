"""Batches through running ranks, fed and timed where the agent would be; no gRPC and no text.

Sampling is greedy, end of text is ignored, and prompts are random, so that no two share a block.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ryzanstein import errors
from ryzanstein.generation.request import SamplingParams
from ryzanstein.lab.bench.engine.memory import cpu_s, peak_rss_bytes, reset_peak_rss
from ryzanstein.worker.engine.messages import StepEvents, SubmitGroup
from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import RANK_COMMAND, ForkServer
from ryzanstein.worker.ranks.starting.process import thread_environment
from ryzanstein.worker.supervision.group import GroupEvents, RanksLost, RanksRefused
from ryzanstein.worker.supervision.messages import RankReady

_GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Round:
    """One batch, run once.

    `ttft_s` is until the last sequence has its first token; decode is all that comes after it.
    `step_times_s` are rank 0's steps that gave tokens; `collectives_s` is its time in collectives
    in all of them. `cpu_s` is the processor time of all ranks. `first_tokens` are in the order of
    the prompts.
    """

    ttft_s: float
    total_tokens_per_s: float
    decode_tokens_per_s: float
    peak_rss_bytes: int
    step_times_s: tuple[float, ...]
    collectives_s: float
    cpu_s: float
    first_tokens: tuple[int, ...]


class Flight:
    """One batch on its way through the ranks."""

    def __init__(self, groups: Sequence[int], began_s: float) -> None:
        self._silent = set(groups)
        self._running = set(groups)
        self._first_tokens = dict.fromkeys(groups, -1)
        self._began_s = began_s
        self._first_s = 0.0
        self._num_tokens = 0
        self._num_decoded = 0
        self._step_times_s: list[float] = []
        self.landed: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_step(self, events: StepEvents, now_s: float) -> None:
        self._num_tokens += len(events.token_ids)
        if events.token_ids:
            self._step_times_s.append(events.step_s)
        if not self._silent:
            self._num_decoded += len(events.token_ids)
        elif self._silent.issubset(events.groups):
            self._first_s = now_s
        for group, token_id in zip(events.groups, events.token_ids, strict=True):
            if group in self._silent:
                self._silent.discard(group)
                self._first_tokens[group] = token_id
        self._running.difference_update(end.group for end in events.ended)
        if events.failed and not self.landed.done():
            self.landed.set_exception(errors.internal(events.failed[0].message))
        if not self._running and not self.landed.done():
            self.landed.set_result(now_s)

    def result(self, peak_rss_bytes: int, collectives_s: float, cpu_s: float) -> Round:
        """Returns the round, once it has landed."""
        end_s = self.landed.result()
        return Round(
            self._first_s - self._began_s,
            self._num_tokens / (end_s - self._began_s),
            self._num_decoded / max(end_s - self._first_s, 1e-9),
            peak_rss_bytes,
            tuple(self._step_times_s),
            collectives_s,
            cpu_s,
            tuple(self._first_tokens.values()),
        )


class Engines:
    """Running ranks that get one batch after another.

    As an async context manager it starts and ends them.
    """

    def __init__(self, spec: RankSpec, vocab_size: int) -> None:
        self._spec = spec
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._num_groups = 0
        self._flight: Flight | None = None
        self._server = ForkServer(RANK_COMMAND, thread_environment(spec))
        events = GroupEvents(self._on_step, lambda trace: None, self._pending)
        self._group = RankGroup(spec, GroupBounds(), events, self._server)
        self.ready: list[RankReady] = []

    async def __aenter__(self) -> Engines:
        try:
            self.ready = await self._group.start()
        except BaseException:
            await self._end(graceful=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end(graceful=True)

    async def _end(self, *, graceful: bool) -> None:
        await self._group.end(graceful=graceful)
        await self._server.close()

    async def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> Round:
        """Runs a batch of random prompts, see `generate`."""
        prompts = [self._random.choices(range(self._vocab_size), k=prompt_tokens) for _ in range(batch)]
        return await self.generate(prompts, new_tokens)

    async def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Round:
        """Submits the batch at once and waits for its end. Raises RanksLost if a rank is lost."""
        groups = range(self._num_groups, self._num_groups + len(prompts))
        self._num_groups += len(prompts)
        before = self._group.progress()
        pids = [progress.pid for progress in before]
        for pid in pids:
            reset_peak_rss(pid)
        began_cpu_s = cpu_s(pids)
        flight = self._flight = Flight(groups, time.perf_counter())
        for group, prompt_ids in zip(groups, prompts, strict=True):
            self._group.send(SubmitGroup(group, prompt_ids, _GREEDY, new_tokens, [], [[]], [False]))
        either: list[asyncio.Future[Any]] = [flight.landed, self._group.lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not flight.landed.done():
            raise RanksLost(self._group.lost.result())
        collectives_s = self.collectives_s()[0] - before[0].collectives_s
        return flight.result(sum(map(peak_rss_bytes, pids)), collectives_s, cpu_s(pids) - began_cpu_s)

    def collectives_s(self) -> tuple[float, ...]:
        """Returns what each rank has spent in collectives so far, including waits for its peers."""
        return tuple(progress.collectives_s for progress in self._group.progress())

    def _on_step(self, events: StepEvents) -> None:
        if self._flight is not None:
            self._flight.on_step(events, time.perf_counter())

    def _pending(self) -> bool:
        return self._flight is not None and not self._flight.landed.done()


@contextmanager
def losses_as_errors() -> Iterator[None]:
    """Turns refused models and lost ranks into a RyzansteinError."""
    try:
        yield
    except (RanksRefused, RanksLost) as error:
        raise errors.failed_precondition("RANKS_FAILED", str(error)) from error
