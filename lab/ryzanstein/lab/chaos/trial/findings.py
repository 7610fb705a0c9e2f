"""From a strike to an observation: what logs and metrics showed, and how the answers compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ryzanstein.lab.chaos.fault import Fault, Scope, Victim
from ryzanstein.lab.chaos.stage.logs import LogLine
from ryzanstein.lab.chaos.stage.scrape import Samples
from ryzanstein.lab.chaos.stage.stage import Stage
from ryzanstein.lab.chaos.trial import evidence
from ryzanstein.lab.chaos.trial import spared as alongside
from ryzanstein.lab.chaos.trial.evidence import Moment
from ryzanstein.lab.chaos.trial.observation import Observation
from ryzanstein.lab.clients.reading import AnswerReading


@dataclass(frozen=True, slots=True)
class Usual:
    """What changes and what is logged without a fault.

    `pause_s` is the longest time between two tokens of an answer.
    """

    metrics: frozenset[str] = frozenset()
    lines: frozenset[str] = frozenset()
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class Strike:
    """What was seen from the strike to its end.

    `kind` is that of the aimed stream. `stuck` are streams that did not end when they should have.
    """

    kind: str
    moment: Moment
    stuck: list[AnswerReading]
    beats: int
    metrics: Mapping[str, Samples]


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What was seen from the strike until everything was as before, at `whole_at`."""

    moment: Moment
    whole_at: float
    lines: Sequence[LogLine]
    usual: Usual


def struck_by(scope: Scope, victim: Victim, under_way: Sequence[AnswerReading]) -> dict[AnswerReading, int]:
    """Returns the streams that are hit, with how many calls each has made."""

    def hit(reading: AnswerReading) -> bool:
        match scope:
            case Scope.NODE:
                return reading.node_id == victim.node_id
            case Scope.ROUTER:
                return reading.router == victim.reading.router
            case Scope.READER:
                return reading is victim.reading
            case Scope.ALL:
                return True

    return {reading: reading.calls for reading in under_way if hit(reading)}


def moment_of(stage: Stage, fault: Fault, struck: dict[AnswerReading, int], victims: frozenset[str]) -> Moment:
    """Returns the moment of the strike, now that the fault is there.

    A fault on several nodes hits the streams of all of them; one with scope ALL also hits those
    that began since.
    """
    under_way = stage.load.under_way
    if fault.scope is Scope.NODE:
        struck |= {reading: reading.calls for reading in under_way if reading.node_id in victims}
    if fault.scope is Scope.ALL:
        struck = {reading: reading.calls for reading in under_way} | struck
    return Moment(*stage.struck_at, struck, victims)


def read(fault: Fault, run: int, strike: Strike, lines: Sequence[LogLine], usual: Usual) -> Observation:
    """Returns the observation without the answers, see `judged`."""
    moment = strike.moment
    detected_s, detected_by = evidence.detection(fault, lines, moment)
    serving_s, startup_s = evidence.restart(lines, moment)
    return Observation(
        fault.name,
        run,
        strike.kind,
        streams=0,
        struck=len(moment.struck),
        detected_s=detected_s,
        detected_by=detected_by,
        rerouted_s=evidence.rerouting(lines, moment),
        first_token_s=evidence.first_token(fault, moment),
        serving_s=serving_s,
        startup_s=startup_s,
        log_lines=Counter(set(evidence.unusual_lines(lines, usual.lines))),
        beats=strike.beats,
        alarms=evidence.alarms(lines) if fault.counts_beats else 0,
        unwanted=evidence.unwanted(fault, lines, strike.metrics),
    )


def judged(
    stage: Stage, seen: Observation, ended: Sequence[AnswerReading], stuck: Sequence[AnswerReading], within_s: float
) -> Observation:
    """Adds what clients saw of answers that ended, and of those that did not end `within_s`."""
    for reading in stuck:
        reading.failure = reading.failure or f"not answered within {within_s:g} s"
    readings = [*ended, *(reading for reading in stuck if reading not in ended)]
    verdicts = [stage.judge(reading) for reading in readings]
    failures = [f"{reading.kind}: {reading.failure}" for reading in readings if reading.failure]
    failures += [
        f"{reading.kind}: {what}"
        for reading, each in zip(readings, verdicts, strict=True)
        for what in (*each.differences, *each.flaws)
    ]
    return replace(
        seen,
        streams=len(readings),
        tokens=sum(reading.num_tokens for reading in readings),
        lost=sum(verdict.lost for verdict in verdicts),
        repeated=sum(verdict.repeated for verdict in verdicts),
        failed=sum(verdict.failed for verdict in verdicts),
        changed=sum(bool(verdict.differences) for verdict in verdicts),
        formed=sum(verdict.formed for verdict in verdicts),
        invalid=sum(bool(verdict.flaws) for verdict in verdicts),
        failures=tuple(failures[:8]),
        troubles=Counter(trouble for reading in readings for trouble in reading.troubles),
    )


def spared(stage: Stage, seen: Observation, ended: Sequence[AnswerReading], aftermath: Aftermath) -> Observation:
    """Adds what happened to the answers of models that were not struck."""
    victims = aftermath.moment.victims
    span = aftermath.moment.monotonic_s, aftermath.whole_at
    struck = {reading.model for reading in aftermath.moment.struck}
    readings = [*ended, *stage.load.under_way]
    others = [reading for reading in alongside.in_span(readings, *span) if reading.model not in struck]
    over = [reading for reading in others if reading in ended]  # the rest is judged when it ends
    flaws = alongside.flaws(over, [stage.judge(reading) for reading in over])
    return replace(
        seen,
        spared=len(others),
        spared_pause_s=alongside.longest_pause(others, *span),
        usual_pause_s=aftermath.usual.pause_s,
        unwanted=seen.unwanted + flaws + alongside.disturbances(aftermath.lines, victims),
    )


def unusual(growth: Mapping[str, float], usual: Usual) -> Counter[str]:
    """Returns metrics that changed and do not without a fault."""
    return Counter(name for name in growth if name not in usual.metrics)
