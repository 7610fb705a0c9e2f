"""The whole measurement: every system in turn, round by round.

So a slow minute of the machine affects all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.router.load.connections import ready
from ryzanstein.lab.bench.router.load.first_token import first_tokens_s
from ryzanstein.lab.bench.router.load.memory import Held, ManyStreams, SlowReaders, held, many_streams, slow_readers
from ryzanstein.lab.bench.router.load.throughput import Throughput, long_answers, short_answers
from ryzanstein.lab.bench.router.scripted.script import Script
from ryzanstein.lab.bench.router.systems import DIRECT, BenchNode, System, running_node, running_system


@dataclass(frozen=True, slots=True)
class SurveyPlan:
    """What is measured. A part of size 0 is left out."""

    systems: tuple[str, ...]
    streams: tuple[int, ...]
    rounds: int
    seconds: float
    first_tokens: int = 150
    idle: int = 500
    active: int = 500
    many: int = 2000
    many_tokens: int = 32
    slow: int = 32
    slow_tokens: int = 4000


@dataclass(slots=True)
class Findings:
    """All results by system, in the order of the rounds.

    `absent`: why a system could not be measured.
    """

    long: dict[tuple[str, int], list[Throughput]] = field(default_factory=dict)
    short: dict[tuple[str, int], list[Throughput]] = field(default_factory=dict)
    first_tokens_s: dict[str, list[float]] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    many: dict[str, ManyStreams] = field(default_factory=dict)
    slow: dict[str, SlowReaders] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields every incomplete or wrong answer of any part, as (system, what was wrong)."""
        for (system, _), rounds in (*self.long.items(), *self.short.items()):
            yield from ((system, problem) for one in rounds for problem in one.problems)
        parts: tuple[Mapping[str, ManyStreams | SlowReaders], ...] = (self.many, self.slow)
        for part in parts:
            yield from ((system, problem) for system, found in part.items() for problem in found.problems)


async def survey(plan: SurveyPlan, people: Console) -> Findings:
    """Runs the plan. A system that is not installed is left out and recorded in `absent`."""
    findings = Findings()
    async with running_node() as node:
        for number in range(plan.rounds):
            first = number % len(plan.systems)
            for name in plan.systems[first:] + plan.systems[:first]:
                people.print(f"round {number + 1} of {plan.rounds}: {name}")
                await _if_there(name, _one_round(name, node, plan, findings), findings)
        for name in plan.systems:
            if name != DIRECT:
                people.print(f"memory, many streams, slow readers: {name}")
                await _if_there(name, _bounds(name, node, plan, findings), findings)
    return findings


async def _if_there(name: str, part: Awaitable[None], findings: Findings) -> None:
    try:
        await part
    except RyzansteinError as error:
        findings.absent[name] = error.message


@contextlib.asynccontextmanager
async def _fresh(name: str, node: BenchNode) -> AsyncIterator[System]:
    async with running_system(name, node.port) as system:
        await ready(system.port)
        yield system


async def _one_round(name: str, node: BenchNode, plan: SurveyPlan, findings: Findings) -> None:
    async with _fresh(name, node) as system:
        if plan.first_tokens:
            findings.first_tokens_s.setdefault(name, []).extend(await first_tokens_s(system, plan.first_tokens))
        for streams in plan.streams:
            cell = (name, streams)
            findings.long.setdefault(cell, []).append(await long_answers(system, node, streams, plan.seconds))
            findings.short.setdefault(cell, []).append(await short_answers(system, node, streams, plan.seconds / 2))


async def _bounds(name: str, node: BenchNode, plan: SurveyPlan, findings: Findings) -> None:
    """Measures memory, many streams and slow readers.

    Each part has its own process, so none affects the next.
    """
    if plan.idle and plan.active:
        async with _fresh(name, node) as system:
            findings.held[name] = await held(system, plan.idle, plan.active)
    if plan.many:
        async with _fresh(name, node) as system:
            findings.many[name] = await many_streams(system, plan.many, Script(plan.many_tokens, step_s=0.25))
    if plan.slow:
        async with _fresh(name, node) as system:
            findings.slow[name] = await slow_readers(system, plan.slow, plan.slow_tokens, step_s=0.001)
