"""The rounds of a suite: each timing is framed by its reference kernels and recorded.

Parts define what to run; this module decides when the kernels run. Every round starts the parts
again. So what differs between two starts of a process (where its memory is, which core it gets) is
part of the spread between rounds, not of a difference between two files: Kalibera and Jones,
Rigorous Benchmarking in Reasonable Time, ISMM 2013.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.lab.bench.engine.reference import References
from ryzanstein.lab.bench.engine.suite.document import KernelTimes, SuiteFigure, SuiteSample

_ENOUGH_S = 0.25
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class Subject:
    """What a figure is about: its name, what its seconds are of, and its reference kernel."""

    name: str
    workload: str
    reference: str


class Part(Protocol):
    """A part of the suite. Nothing that it starts outlives its round."""

    async def round(self, log: RoundLog) -> None:
        """Times each of its figures once."""
        ...


class RoundLog:
    """The record of every figure of every round."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._subjects: dict[str, Subject] = {}
        self._samples: dict[str, list[SuiteSample]] = {}
        self._kernels_s: dict[str, list[float]] = {name: [] for name in references.definitions}

    def begin_round(self) -> None:
        """Times every reference kernel, to record how fast the machine was."""
        for name, seconds in self._references.time(self._kernels_s).items():
            self._kernels_s[name].append(seconds)

    async def time(self, subjects: Sequence[Subject], run: Callable[[], Awaitable[Sequence[float]]]) -> None:
        """Awaits `run` once. It returns the subjects' seconds, in their order."""
        kernels = {subject.reference for subject in subjects}
        before = self._references.time(kernels)
        seconds = await run()
        after = self._references.time(kernels)
        for subject, value in zip(subjects, seconds, strict=True):
            self._add(subject, SuiteSample.of(value, before[subject.reference], after[subject.reference]))

    def figures(self) -> list[SuiteFigure]:
        """Returns the figures in the order of the first round."""
        return [
            SuiteFigure(subject.name, subject.workload, subject.reference, self._samples[subject.name])
            for subject in self._subjects.values()
        ]

    def kernels(self) -> dict[str, KernelTimes]:
        """Returns the kernels' times, once a round has begun."""
        definitions = self._references.definitions
        return {name: KernelTimes(definitions[name], seconds) for name, seconds in self._kernels_s.items()}

    def _add(self, subject: Subject, sample: SuiteSample) -> None:
        self._subjects.setdefault(subject.name, subject)
        self._samples.setdefault(subject.name, []).append(sample)


async def repeated(run: Callable[[], Awaitable[Mapping[str, float]]]) -> dict[str, float]:
    """Runs for a quarter of a second, one to eight times, and returns the median of each value.

    A single time slice that the scheduler gives to another process would distort one short run.
    """
    began_s = time.perf_counter()
    runs: list[Mapping[str, float]] = []
    while not runs or (len(runs) < _MOST_RUNS and time.perf_counter() - began_s < _ENOUGH_S):
        runs.append(await run())
    return {key: statistics.median(values[key] for values in runs) for key in runs[0]}
