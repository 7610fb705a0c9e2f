"""`ryzanstein trace`: where a request spent its time, from the face of a router to each rank's steps."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ryzanstein.cli import display
from ryzanstein.cli.logs.command import StateDir, logs_directory
from ryzanstein.cli.options import text_value
from ryzanstein.cli.processes.cluster import TRACES
from ryzanstein.cli.trace.reading import Trace, TracedSpan, read_traces

_BAR = 32
_LATEST = 20
_MOST_SPANS = 200
_HIDDEN = frozenset(
    {
        "ryzanstein.attempt",
        "ryzanstein.step",
        "ryzanstein.hedge",
        "ryzanstein.rank",
        "rpc.system",
        "rpc.method",
        "http.request.method",
    }
)
_COLORS = {"attempt": "cyan", "step": "magenta"}


def trace(
    wanted: Annotated[
        str,
        typer.Argument(metavar="[ID]", callback=text_value, help="A request, generation or trace; empty: the latest."),
    ] = "",
    *,
    every: Annotated[bool, typer.Option("--all", help=f"Show all spans, not the first {_MOST_SPANS}.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", file_okay=False, help="The trace_dir of services.")] = None,
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the spans as one JSON document.")] = False,
) -> None:
    """Show where a request spent its time, or the latest requests.

    `ryzanstein up --trace` records all of them; other clusters with the setting trace_dir. Exit code 1: there is no such trace.
    """
    folder = folder or logs_directory(state_dir) / TRACES
    found = [each for each in read_traces(folder) if not wanted or each.is_of(wanted)]
    if not found:
        what = (
            f"no trace of {wanted!r} in {folder}" if wanted else f"no traces in {folder}: `ryzanstein up --trace` writes some"
        )
        display.people().print(what, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    if as_json:
        display.print_json([{"trace_id": each.trace_id, "spans": [asdict(span) for span in each.spans]} for each in found])
    elif wanted:
        for each in found:
            _show(each, None if every else _MOST_SPANS)
    else:
        _list(found[-_LATEST:])


def _list(traces: list[Trace]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("began", "took", "spans", "what", "id"):
        table.add_column(name, justify="right" if name in ("took", "spans") else "left", no_wrap=True)
    for each in traces:
        began = datetime.fromtimestamp(each.began_ns / 1e9, UTC).strftime("%H:%M:%S.%f")[:-3]
        _, first = next(each.tree())
        ids = sorted(each.ids - {each.trace_id}, key=len)
        error = next((span.error for span in each.spans if span.error), "")
        what = Text(f"{first.name} {first.attributes.get('url.path', '')}".strip())
        what.append(f"  {error}", "red")
        table.add_row(began, _ms(each.ended_ns - each.began_ns), str(len(each.spans)), what, ids[0] if ids else each.trace_id)
    display.output().print(table)


def _show(each: Trace, most: int | None) -> None:
    """Prints a trace as a waterfall."""
    out, whole = display.output(), max(1, each.ended_ns - each.began_ns)
    table = Table(box=None, pad_edge=False, title=f"trace {each.trace_id}", title_justify="left", title_style="bold")
    for name, right in (("at", True), ("took", True), ("", False), ("span", False), ("", False)):
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "" or right)
    rows = list(each.tree())
    names = {span.span_id: _name(span) for span in each.spans}
    for depth, span in rows[:most]:
        begin = _BAR * (span.began_ns - each.began_ns) // whole
        width = max(1, round(_BAR * (span.ended_ns - span.began_ns) / whole))
        style = "red" if span.error else _COLORS.get(span.name, "")
        bar = Text(" " * begin + "━" * min(width, _BAR - begin), style or "blue", no_wrap=True)
        title = Text("  " * depth + names[span.span_id], style)
        about = [*_about(span), *(f"after {names[other]}" for other in span.after if other in names)]
        table.add_row(_ms(span.began_ns - each.began_ns), _ms(span.ended_ns - span.began_ns), bar, title, " ".join(about))
    out.print(table)
    if most is not None and len(rows) > most:
        out.print(f"and {len(rows) - most} more spans: --all shows them", markup=False)


def _name(span: TracedSpan) -> str:
    number = span.attributes.get("ryzanstein.attempt", span.attributes.get("ryzanstein.step", ""))
    where = f" ({span.service})" if span.name.startswith(("node.", "generation", "ryzanstein.v1")) else ""
    return f"{span.name} {number}".strip() + where


def _about(span: TracedSpan) -> list[str]:
    told = [(name, value) for name, value in span.attributes.items() if name not in _HIDDEN]
    return [f"{name.removeprefix('ryzanstein.')}={_shown(value)}" for name, value in told]


def _shown(value: object) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
