"""Measures overload of the engine alone, in simulated time: the effect of its decisions, independent of the machine.

    .venv/bin/python lab/benchmarks/overload_policy.py

The real engine (queue, scheduler, predictions, refusals) over ranks that compute nothing: a step takes 10 ms plus 0.2 ms per
token. Poisson arrivals for 60 simulated seconds at multiples of the capacity; prompts of 8 to 200 tokens; answers that use
their whole limit ("regular": 16 to 112 tokens) or end at random ("irregular": 64 on average, at most 400). Deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from traffic import quantile

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.messages import StepEvents, SubmitGroup
from ryzanstein.worker.engine.plan import PageMove, Rearrangement, SampledToken, SampleRow, StepPlan
from ryzanstein.worker.settings.rank_settings import QueueSettings

STEP_S, TOKEN_S = 0.010, 0.0002
PLACES, OBJECTIVE_S, SECONDS, SETTLE_S = 8, 0.5, 60.0, 5.0
LOADS = (0.5, 1.0, 2.0, 3.0, 10.0)
STOP, WORD = 1, 2


class SimulatedRanks:
    """Time passes with every step; an irregular answer ends in any of them with the same chance."""

    def __init__(self, chance: float) -> None:
        self.now, self._chance, self._random = 0.0, chance, random.Random(7)

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> Sequence[SampledToken]:
        self.now += STEP_S + TOKEN_S * len(plan.token_ids)
        return [SampledToken(STOP if self._random.random() < self._chance else WORD) for _ in rows]

    def rearrange(self, change: Rearrangement) -> None:
        """There is no cache."""

    def move_pages(self, move: PageMove) -> None:
        """There is no cache."""


@dataclass
class Seen:
    """What was seen: first tokens of all groups, the rest since the engine had settled."""

    tokens: int = 0
    good: int = 0
    first_s: dict[int, float] = field(default_factory=dict)
    refused: int = 0
    refused_late: int = 0


class Simulation:
    def __init__(self, objective_s: float, regular: bool) -> None:
        self._ranks = SimulatedRanks(0.0 if regular else 1 / 64)
        settings = EngineSettings(8192, 16, PLACES, 512, QueueSettings(ttft_objective_s=objective_s))
        self._engine = Engine(settings, self._ranks, lambda: self._ranks.now, lambda: self._ranks.now)
        self._most = (16, 112) if regular else (400, 400)
        self._random = random.Random(1)
        self._came: dict[int, float] = {}
        self._accepted: set[int] = set()
        self.seen = Seen()

    def run(self, rate: float) -> Seen:
        at = 0.0
        while self._ranks.now < SETTLE_S + SECONDS:
            while at <= self._ranks.now:
                self._submit(at)
                at += self._random.expovariate(rate)
            if self._engine.has_work:
                self._read(self._engine.step())
            else:
                self._ranks.now = at
        return self.seen

    def _submit(self, at: float) -> None:
        number = len(self._came)
        self._came[number] = at
        prompt = [number % 1000] * self._random.randint(8, 200)
        most = self._random.randint(*self._most)
        self._engine.submit(SubmitGroup(number, prompt, SamplingParams(temperature=0.0), most, [STOP], [[]], [False]))

    def _read(self, events: StepEvents) -> None:
        seen = self.seen
        self._accepted.update(events.accepted)
        for number in events.groups:
            seen.first_s.setdefault(number, self._ranks.now - self._came[number])
        if self._ranks.now < SETTLE_S:
            return
        seen.tokens += len(events.groups)
        seen.good += sum(seen.first_s[number] <= OBJECTIVE_S for number in events.groups)
        seen.refused += len(events.failed)
        seen.refused_late += sum(failure.group in self._accepted for failure in events.failed)


def main() -> None:
    for regular in (True, False):
        name = "regular" if regular else "irregular"
        peak = Simulation(0.0, regular).run(100.0)
        capacity = peak.tokens / SECONDS / 64
        print(f"{name} answers: {peak.tokens / SECONDS:.0f} tokens/s at most")
        rows = [(load, OBJECTIVE_S) for load in LOADS] + [(3.0, 0.0)]
        for load, objective_s in rows:
            seen = Simulation(objective_s, regular).run(load * capacity)
            first_s = list(seen.first_s.values())
            print(
                f"  {load:4.1f}x{'' if objective_s else ' without an objective'}: throughput {seen.tokens / peak.tokens:.0%}, "
                f"goodput {seen.good / peak.tokens:.0%} of the peak; first token p50 {quantile(first_s, 0.5) * 1e3:.0f} ms, "
                f"p99 {quantile(first_s, 0.99) * 1e3:.0f} ms; {seen.refused} refused, {seen.refused_late} of them late"
            )


if __name__ == "__main__":
    main()
