"""From log lines and readings to figures.

They show when a fault was detected, when streams continued, and when a node served again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ryzanstein.lab.chaos.fault import Fault
from ryzanstein.lab.chaos.stage.logs import LogLine
from ryzanstein.lab.chaos.stage.scrape import BREAKER_STATE, Samples
from ryzanstein.lab.chaos.trial.spared import node_of
from ryzanstein.lab.clients.reading import AnswerReading

CLIENT = "client"
# A line this much later was written with a clock that jumped: its time means nothing.
_ANOTHER_TIME_S = 600.0
_ALARMS = ("node suspected",)
_CAUSES_OF_ALARMS = ("silence", "deaf", "stall")


@dataclass(frozen=True, slots=True)
class Moment:
    """The strike on both clocks, and the streams that it hit with their calls so far.

    `victims`: node ids.
    """

    wall_s: float
    monotonic_s: float
    struck: Mapping[AnswerReading, int]
    victims: frozenset[str] = frozenset()


def detection(fault: Fault, lines: Sequence[LogLine], moment: Moment) -> tuple[float | None, str]:
    """Returns the seconds from the strike to its first sign, and that sign."""
    if not fault.signs:
        broken = [at for reading in moment.struck for at in reading.broken_at if at >= moment.monotonic_s]
        return (min(broken) - moment.monotonic_s, f"{CLIENT}: stream broke") if broken else (None, "")
    for line in lines:
        if 0 <= line.at - moment.wall_s < _ANOTHER_TIME_S and _concerns(line, moment.victims):
            for sign in fault.signs:
                if sign.matches(line):
                    return line.at - moment.wall_s, str(sign)
    return None, ""


def _concerns(line: LogLine, victims: frozenset[str]) -> bool:
    """Returns whether a line is about a victim, or about a node of which a victim is a model."""
    node_id = line.fields.get("node_id")
    return not victims or node_id is None or node_id in victims | {node_of(victim) for victim in victims}


def rerouting(lines: Sequence[LogLine], moment: Moment) -> float | None:
    """Returns the longest time from detection to the attempt on the next node."""
    took = [
        float(line.fields["detected_to_rerouted_s"])
        for line in lines
        if line.event == "generation failed over" and line.at >= moment.wall_s
    ]
    return max(took, default=None)


def first_token(fault: Fault, moment: Moment) -> float | None:
    """Returns the longest time that a struck stream waited for its first new token."""
    waits = []
    for reading, calls in moment.struck.items():
        new = (
            arrival.at
            for arrival in reading.arrivals
            if arrival.at > moment.monotonic_s + fault.in_flight_s and fault.resumes.holds(arrival, moment.victims, calls)
        )
        if (at := next(new, None)) is not None:
            waits.append(at - moment.monotonic_s)
    return max(waits, default=None)


def restart(lines: Sequence[LogLine], moment: Moment) -> tuple[float | None, dict[str, float]]:
    """Returns the time from a rank's loss to the node's readiness.

    Also returns the phases of the slowest rank.
    """
    for victim in sorted(moment.victims):
        of_node = [line for line in lines if line.service == node_of(victim) and line.at >= moment.wall_s]
        lost = next((line.at for line in of_node if line.event == "ranks lost"), None)
        ready = next((line for line in reversed(of_node) if line.event == "ranks ready"), None)
        if lost is not None and ready is not None and ready.at > lost:
            return ready.at - lost, _slowest_phases(ready)
    return None, {}


def _slowest_phases(ready: LogLine) -> dict[str, float]:
    ranks = [phases for name, phases in ready.fields.items() if name.startswith("rank_") and isinstance(phases, dict)]
    slowest = max(ranks, key=lambda phases: sum(phases.values()), default={})
    return {str(name): float(seconds) for name, seconds in slowest.items()}


def unwanted(fault: Fault, lines: Sequence[LogLine], metrics: Mapping[str, Samples]) -> Counter[str]:
    """Counts what the fault must not lead to, but did.

    It uses log lines and breakers that are not closed.
    """
    if not fault.unwanted:
        return Counter()
    message = Counter(str(sign) for line in lines for sign in fault.unwanted if sign.matches(line))
    states = (value for samples in metrics.values() for name, value in samples.items() if name.startswith(BREAKER_STATE))
    message["breaker open"] = sum(value > 0 for value in states)
    return +message


def unusual_lines(lines: Sequence[LogLine], usual: frozenset[str]) -> Counter[str]:
    """Counts the kinds of lines that a cluster without faults does not log."""
    return Counter(kind for line in lines if (kind := kind_of(line)) not in usual)


def kind_of(line: LogLine) -> str:
    """Returns the service without its number, the level, the event and its cause."""
    cause = line.fields.get("cause")
    service = line.service.rstrip("0123456789").rstrip("-")
    return f"{service} {line.level}: {line.event}" + (f" ({cause})" if cause else "")


def alarms(lines: Sequence[LogLine]) -> int:
    """Counts suspected nodes and lost links with the cause silence, deafness or a stall."""
    suspected = (line for line in lines if line.event in (*_ALARMS, "link down"))
    return sum(line.fields.get("cause") in _CAUSES_OF_ALARMS for line in suspected)
