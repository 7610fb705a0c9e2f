"""The spans that services wrote to files, see `observe.spans.files`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILES = ("*.jsonl.1", "*.jsonl")
_IDS = ("ryzanstein.request_id", "ryzanstein.generation_id")
_ERROR = 2


@dataclass(frozen=True, slots=True)
class TracedSpan:
    """A span. Times are nanoseconds in Unix time. `after`: the spans that it is linked to."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    error: str = ""
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Trace:
    """The spans of one trace, earliest first."""

    trace_id: str
    spans: list[TracedSpan] = field(default_factory=list)

    @property
    def began_ns(self) -> int:
        return min(span.began_ns for span in self.spans)

    @property
    def ended_ns(self) -> int:
        return max(span.ended_ns for span in self.spans)

    @property
    def ids(self) -> set[str]:
        """Returns what one may ask for: its own id, and those of its requests and generations."""
        named = {str(span.attributes[name]) for span in self.spans for name in _IDS if span.attributes.get(name)}
        return {self.trace_id, *named}

    def is_of(self, wanted: str) -> bool:
        """Returns whether an id is one of its own. An id of the HTTP API ends with its generation's."""
        return any(each == wanted or (len(each) > 8 and wanted.endswith(each)) for each in self.ids)

    def tree(self) -> Iterator[tuple[int, TracedSpan]]:
        """Yields each span with its depth, below its parent, in the order of time."""
        known = {span.span_id for span in self.spans}
        below: dict[str, list[TracedSpan]] = {}
        for span in sorted(self.spans, key=lambda each: (each.began_ns, -each.ended_ns)):
            below.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
        open_spans = [(0, span) for span in reversed(below.get("", []))]
        while open_spans:
            depth, span = open_spans.pop()
            yield depth, span
            open_spans += [(depth + 1, each) for each in reversed(below.pop(span.span_id, []))]


def read_traces(folder: Path) -> list[Trace]:
    """Returns all traces of a folder, the earliest first. Lines that cannot be read are left out. Raises OSError."""
    traces: dict[str, Trace] = {}
    for pattern in _FILES:
        for path in sorted(folder.glob(pattern)):
            with path.open(encoding="utf-8", errors="replace") as lines:
                for span in _spans(lines):
                    traces.setdefault(span.trace_id, Trace(span.trace_id)).spans.append(span)
    return sorted(traces.values(), key=lambda trace: trace.began_ns)


def _spans(lines: Iterable[str]) -> Iterator[TracedSpan]:
    for line in lines:
        try:
            yield from list(_read(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # it is being written, or is not ours


def _read(request: dict[str, Any]) -> Iterator[TracedSpan]:
    for resource in request["resourceSpans"]:
        about = _attributes(resource["resource"])
        service = str(about.get("node_id") or about.get("service.instance.id") or about.get("service.name", ""))
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            status = span.get("status", {})
            failed = status.get("code") in (_ERROR, "STATUS_CODE_ERROR")
            yield TracedSpan(
                service,
                span["name"],
                span["traceId"],
                span["spanId"],
                span.get("parentSpanId", ""),
                int(span["startTimeUnixNano"]),
                int(span["endTimeUnixNano"]),
                _attributes(span),
                (status.get("message") or "error") if failed else "",
                tuple(link["spanId"] for link in span.get("links", ())),
            )


def _attributes(of: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in of.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    ((kind, found),) = value.items()
    return int(found) if kind == "intValue" else found
