"""Lays the Chrome traces of a node's ranks over each other.

All times are counted from the same moment, each rank is a process, and an arrow goes from the rank that came last into a
collective to each rank that waited there for it. The format is that of Chrome's trace events. Events are written one after
another: a trace may have hundreds of MiB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

_PROCESSES = 1000
"""Process ids of a rank: this times its number for its own, those after it for its devices and for rows without a process."""
_IDS = 2**32
_FLOWS = "s", "t", "f"


class _Head(msgspec.Struct, frozen=True):
    """What a trace says of its rank."""

    pid: int


class RankTrace(msgspec.Struct, frozen=True, rename={"base_ns": "baseTimeNanoseconds", "events": "traceEvents"}):
    """A trace as a rank wrote it. `base_ns`: the Unix time that its events count from."""

    ryzanstein: _Head
    events: list[msgspec.Raw]
    base_ns: int = 0


@dataclass(slots=True)
class MergedTrace:
    """What a merged trace has: ranks, steps that all of them ran, collectives, and arrows between their ranks."""

    ranks: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_collectives: int = 0
    num_arrows: int = 0


@dataclass(frozen=True, slots=True)
class _Stay:
    """A rank's stay in a collective: its process and thread in the merged trace, and its times in microseconds."""

    pid: int
    tid: int
    arrived: float
    left: float


def merge(traces: Mapping[int, bytes], out: BinaryIO) -> MergedTrace:
    """Writes one trace of those of these ranks.

    Raises ValueError if one is no trace of a rank, OSError if it cannot be written.
    """
    read = {rank: _read(rank, trace) for rank, trace in sorted(traces.items())}
    first_ns = min((trace.base_ns for trace in read.values()), default=0)
    merged, steps = MergedTrace(list(read)), list[set[str]]()
    stays: dict[int, list[_Stay]] = defaultdict(list)
    out.write(b'{"displayTimeUnit": "ms", "baseTimeNanoseconds": %d, "traceEvents": [\n' % first_ns)
    out.write(msgspec.json.encode({"ph": "M", "name": "ryzanstein", "pid": 0, "tid": 0, "args": {"ranks": list(read)}}))
    for rank, trace in read.items():
        names: set[str] = set()
        for event in _moved(rank, trace, (trace.base_ns - first_ns) / 1e3):
            _note(event, names, stays)
            _write(out, event)
        steps.append(names)
    for place, ranks in enumerate(stays.values()):
        for arrow in _arrows(place, ranks):
            merged.num_arrows += arrow["ph"] == "f"
            _write(out, arrow)
    out.write(b"\n]}\n")
    merged.num_steps, merged.num_collectives = len(set.intersection(*steps)) if steps else 0, len(stays)
    return merged


def _read(rank: int, trace: bytes) -> RankTrace:
    try:
        return msgspec.json.decode(trace, type=RankTrace)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the trace of rank {rank} cannot be read: {error}") from None


def _write(out: BinaryIO, event: Mapping[str, Any]) -> None:
    out.write(b",\n")
    out.write(msgspec.json.encode(event))


def _moved(rank: int, trace: RankTrace, later: float) -> Iterator[dict[str, Any]]:
    """Yields the events of a rank, `later` by so many microseconds, in processes of its own."""
    places: dict[object, int] = {trace.ryzanstein.pid: rank * _PROCESSES}
    for raw in trace.events:
        event: dict[str, Any] = msgspec.json.decode(raw)
        own = event.get("pid")
        event["pid"] = pid = places.setdefault(own, rank * _PROCESSES + len(places))
        if event.get("ph") == "M":
            _name_process(event, rank, pid, own)
        else:
            event["ts"] = float(event.get("ts", 0)) + later
        if event.get("ph") in _FLOWS and isinstance(event.get("id"), int):
            event["id"] += (rank + 1) * _IDS
        yield event


def _name_process(event: dict[str, Any], rank: int, pid: int, own: object) -> None:
    if event.get("name") == "process_name":
        event["args"] = {"name": f"rank {rank}" if pid == rank * _PROCESSES else f"rank {rank}, {own}"}
    elif event.get("name") == "process_sort_index":
        event["args"] = {"sort_index": pid}


def _note(event: Mapping[str, Any], steps: set[str], stays: Mapping[int, list[_Stay]]) -> None:
    if event.get("cat") == "step":
        steps.add(event["name"])
    elif event.get("cat") == "collective":
        arrived = event["ts"]
        stays[event["args"]["number"]].append(_Stay(event["pid"], event["tid"], arrived, arrived + event["dur"]))


def _arrows(place: int, ranks: Iterable[_Stay]) -> Iterator[dict[str, Any]]:
    """Yields an arrow from the last rank to each other one: where it ends, that one no longer waits."""
    last, *others = sorted(ranks, key=lambda stay: stay.arrived, reverse=True)
    about = {"cat": "collective", "name": "arrives last"}
    for other in others:
        number = {"id": place * _PROCESSES + other.pid // _PROCESSES}
        yield {**about, **number, "ph": "s", "pid": last.pid, "tid": last.tid, "ts": last.arrived}
        ends = min(max(last.arrived, other.arrived), other.left)
        yield {**about, **number, "ph": "f", "bp": "e", "pid": other.pid, "tid": other.tid, "ts": ends}
