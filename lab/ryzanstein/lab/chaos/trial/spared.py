"""What a fault of one model did to the other models of the same nodes: nothing, if all is well.

A router names model b of node-0 as node-0/b, and the first model as node-0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ryzanstein.lab.chaos.stage.logs import LogLine
from ryzanstein.lab.clients.judge import Verdict
from ryzanstein.lab.clients.reading import AnswerReading

# How a router says that it left a node or lost faith in it.
_MOVED = {"generation failed over": "from_node", "node suspected": "node_id", "link down": "node_id"}


def node_of(name: str) -> str:
    """Returns the node of a name."""
    return name.partition("/")[0]


def of_model(name: str) -> str:
    """Returns the model of a name; empty for the first one."""
    return name.partition("/")[2]


def longest_pause(readings: Iterable[AnswerReading], begins: float, ends: float) -> float | None:
    """Returns the longest time between two arrivals of one answer that overlaps the span.

    Times are those of time.monotonic(). None: no answer had two arrivals there.
    """
    pauses = (
        later.at - earlier.at
        for reading in readings
        for earlier, later in zip(reading.arrivals, reading.arrivals[1:], strict=False)
        if later.at > begins and earlier.at < ends
    )
    return max(pauses, default=None)


def in_span(readings: Iterable[AnswerReading], begins: float, ends: float) -> list[AnswerReading]:
    """Returns the answers with tokens in the span, or across it."""
    return [each for each in readings if each.arrivals and each.arrivals[-1].at > begins and each.arrivals[0].at < ends]


def disturbances(lines: Sequence[LogLine], victims: Collection[str]) -> Counter[str]:
    """Counts the lines in which a router leaves or suspects what was not struck."""
    moved = ((line, str(line.fields.get(_MOVED[line.event]))) for line in lines if line.event in _MOVED)
    return Counter(f"{line.event} ({name})" for line, name in moved if name not in victims)


def flaws(readings: Sequence[AnswerReading], verdicts: Sequence[Verdict]) -> Counter[str]:
    """Counts the answers of other models that are not as they must be, or moved to another node."""
    wrong = sum(not verdict.flawless for verdict in verdicts)
    again = sum(reading.calls > 1 for reading in readings)
    moved = sum(len({arrival.node_id for arrival in reading.arrivals}) > 1 for reading in readings)
    counts = {"answers of another model wrong": wrong, "read again": again, "moved": moved}
    return +Counter(counts)
