"""The spans of steps: which are shown, under what, and when."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from ryzanstein.cli.trace.reading import Trace, read_traces
from ryzanstein.observe.tracing import Tracing
from ryzanstein.worker.agent.versions.step_spans import StepSpans
from ryzanstein.worker.engine.messages import StepEvents
from ryzanstein.worker.supervision.group import RankStep, RankWait
from ryzanstein.worker.telemetry import NO_STATS

GROUP = 7


def events(step: int, step_s: float = 0.01, groups: tuple[int, ...] = (GROUP,), **more: Any) -> StepEvents:
    return StepEvents(step, list(groups), [0] * len(groups), [5] * len(groups), {}, [], [], NO_STATS, step_s, **more)


class World:
    """Ranks that recorded every step, and a generation that is traced."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.folder, self.asked, self.began_s = folder, [], time.monotonic()
        self.tracing = Tracing("worker", folder=folder, name="node-0", **how)
        self.spans = StepSpans(self.tracing, self.steps)
        self.phase = self.tracing.start("node.prefill")

    def steps(self, step: int) -> list[RankStep]:
        self.asked.append(step)
        wait = RankWait("all_reduce", 10 * step, self.began_s + step + 0.002, 0.003, 0)
        late = RankStep(0, self.began_s + step, 4, 0.005, 0.001, 0.002)
        return [late, RankStep(1, self.began_s + step, 4, 0.002, 0.003, 0.0, wait)]

    def trace(self) -> Trace:
        self.phase.end()
        self.tracing.close()
        (trace,) = read_traces(self.folder)
        return trace


async def test_a_step_has_a_span_of_each_rank_and_of_its_longest_wait(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.spans.begin(GROUP, world.phase)
    world.spans.on_step(events(3))
    assert not world.asked, "ranks may still write"
    world.spans.on_step(events(4, groups=(8,)))
    rows = [(depth, span.name) for depth, span in world.trace().tree()]
    assert rows == [(0, "node.prefill"), (1, "step"), (2, "rank 0"), (2, "rank 1"), (3, "all_reduce")]
    found = {span.name: span for _, span in read_traces(tmp_path)[0].tree()}
    step, first, wait = found["step"], found["rank 0"], found["all_reduce"]
    assert abs((step.ended_ns - step.began_ns) - 8_000_000) < 1_000
    assert (step.began_ns, step.ended_ns) == (first.began_ns, first.ended_ns)
    assert abs((wait.ended_ns - wait.began_ns) - 3_000_000) < 1_000
    assert (wait.attributes["ryzanstein.collective"], wait.attributes["ryzanstein.late_rank"]) == (30, 0)
    assert first.attributes["ryzanstein.compute_s"] == 0.005


async def test_of_tokens_the_first_every_32nd_and_slow_steps_are_shown(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.spans.begin(GROUP, world.phase, decodes=True)
    for step in range(1, 71):
        world.spans.on_step(events(step, 0.2 if step == 40 else 0.01))
    world.spans.end(GROUP)
    await asyncio.sleep(0.1)
    assert world.asked == [1, 33, 40, 65]


async def test_a_prompt_in_parts_has_all_its_steps_and_the_last_one_comes_without_another(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.spans.begin(GROUP, world.phase)
    for step in (1, 2, 3):
        world.spans.on_step(events(step, groups=(), prefilled=[(GROUP, 16 * step)]))
    world.spans.end(GROUP)
    await asyncio.sleep(0.1)
    assert world.asked == [1, 2, 3]


async def test_what_is_not_recorded_costs_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, ratio=0.0)
    world.spans.begin(GROUP, world.phase)
    for step in range(100):
        world.spans.on_step(events(step))
    world.spans.end(GROUP)
    await asyncio.sleep(0.1)
    assert not world.asked
    world.tracing.close()


async def test_no_more_spans_are_made_than_a_collector_takes(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.spans.begin(GROUP, world.phase)
    for step in range(1_000):
        world.spans.on_step(events(step))
    assert world.spans.num_dropped > 3_000
    assert len(world.trace().spans) < 1_100
